"""Sizes by module path as a tree that a page can fold: top-level modules first, each with what lies in it.

Start reading at `module_tree`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.reports.blocks import Branch, Tree
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
    """Return the tree of paths as `named_modules` gives them. A chain of modules with one child each is one node,
    as `model.layers`."""
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


def module_tree(sizes: Mapping[str, int]) -> Tree:
    """Return the tree of a page: largest modules first, each with a gauge of its share of all bytes."""
    root = tree_of(sizes)
    return Tree(_branches(root, max(root.total, 1)))


def _branches(node: Node, whole: int) -> tuple[Branch, ...]:
    ordered = sorted(node.children.values(), key=lambda child: (-child.total, _natural(child.name)))
    branches = []
    if node.own and ordered:
        branches.append(_branch("(its own operators)", node.own, whole))
    shown = [child for child in ordered[:MOST_CHILDREN] if child.total >= LEAST_SHARE * whole]
    for child in shown:
        is_open = child.total >= OPEN_SHARE * whole and len(child.children) <= MOST_OPEN
        branches.append(_branch(child.name, child.total, whole, _branches(child, whole), is_open))
    if rest := ordered[len(shown) :]:
        branches.append(_branch(f"{len(rest)} more", sum(child.total for child in rest), whole))
    return tuple(branches)


def _branch(
    name: str, nbytes: int, whole: int, children: tuple[Branch, ...] = (), is_open: bool = False
) -> Branch:  # fmt: skip
    share = nbytes / whole
    return Branch(name, share, (f"{nbytes / MIB:,.1f}", f"{share:.1%}"), children, is_open)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort `layer10` after `layer9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
