"""Sizes by module path as a tree that a page can fold: top-level modules first, each with what lies in it.

Start reading at `module_tree_html`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from conf.units import MIB

MOST_CHILDREN = 64  # of one node that are shown, and the least share of all; the rest is summed up
LEAST_SHARE = 0.001
OPEN_SHARE, MOST_OPEN = 0.4, 16  # a node that holds this share of all is unfolded, if it is not too long
NOWHERE = "outside any module"


@dataclass
class Node:
    """A module: `own` bytes made by itself, `total` with what lies in it."""

    name: str
    own: int = 0
    total: int = 0
    children: dict[str, Node] = field(default_factory=dict)


def tree_of(sizes: Mapping[str, int]) -> Node:
    """Paths as in `named_modules` -> the tree. A chain of modules with one child each is one node: `model.layers`."""
    root = Node("")
    for path, nbytes in sizes.items():
        node = root
        node.total += nbytes
        for part in (path or NOWHERE).split("."):
            node = node.children.setdefault(part, Node(part))
            node.total += nbytes
        node.own += nbytes
    root.children = {child.name: child for child in map(_joined, root.children.values())}
    return root


def _joined(node: Node) -> Node:
    node.children = {child.name: child for child in map(_joined, node.children.values())}
    if len(node.children) == 1 and not node.own:
        (child,) = node.children.values()
        return Node(f"{node.name}.{child.name}", child.own, child.total, child.children)
    return node


def module_tree_html(sizes: Mapping[str, int]) -> str:
    """Nested `<details>`, the largest first, each with a bar as wide as its share of all."""
    root = tree_of(sizes)
    return f'<div class="tree">{_children(root, max(root.total, 1))}</div>'


def _children(node: Node, whole: int) -> str:
    ordered = sorted(node.children.values(), key=lambda child: (-child.total, _natural(child.name)))
    found = []
    if node.own and ordered:
        found.append(_row("(its own operators)", node.own, whole))
    shown = [child for child in ordered[:MOST_CHILDREN] if child.total >= LEAST_SHARE * whole]
    for child in shown:
        row = _row(child.name, child.total, whole)
        if child.children:
            unfolded = " open" if child.total >= OPEN_SHARE * whole and len(child.children) <= MOST_OPEN else ""
            inner = _children(child, whole)
            found.append(f"<details{unfolded}><summary>{row}</summary><div>{inner}</div></details>")
        else:
            found.append(row)
    if rest := ordered[len(shown) :]:
        found.append(_row(f"{len(rest)} more", sum(child.total for child in rest), whole))
    return "".join(found)


def _row(name: str, nbytes: int, whole: int) -> str:
    share = nbytes / whole
    return (
        f'<span class="row"><code>{escape(name)}</code><span class="gauge"><i style="width:{100 * share:.2f}%"></i>'
        f"</span><span>{nbytes / MIB:,.1f}</span><span>{share:.1%}</span></span>"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """`layer10` after `layer9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
