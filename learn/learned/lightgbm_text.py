"""LightGBM's text of a model, checked before LightGBM parses it: it trusts sizes and indices blindly.

Start reading at `booster_of`. A text that was cut, or whose trees point outside of themselves, ends the process in
LightGBM, at load or at the first prediction; no exception can be caught.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import lightgbm

_END = "end of trees"
_END_OF_ALL = "\nend of parameters\n\npandas_categorical:"
_NODES = (
    "split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child", "internal_value",
    "internal_weight", "internal_count",
)  # fmt: skip
_LEAVES = ("leaf_value", "leaf_weight", "leaf_count")
_NEEDED = ("split_feature", "threshold", "decision_type", "left_child", "right_child", "leaf_value")
_CATEGORIES = ("cat_boundaries", "cat_threshold")
_OTHERS = ("num_leaves", "num_cat", "is_linear", "shrinkage")
_WHOLE = ("split_feature", "decision_type", "left_child", "right_child", *_CATEGORIES)
_CATEGORICAL = 1  # bit of decision_type
_FIGURE = r"-?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|inf|nan)"
_NUMBERS = re.compile(f"(?:{_FIGURE}(?: {_FIGURE})*)?", re.ASCII)
_INTEGERS = re.compile(r"(?:-?\d{1,10}(?: -?\d{1,10})*)?", re.ASCII)
_MOST_TREES = 100_000
_MOST_LEAVES = 1_000_000

_vouched: set[str] = set()  # SHA-256 of texts that came with the project, verified


def booster_of(text: str) -> lightgbm.Booster:
    """The booster of a text, for predicting. `ValueError` for a text that is not whole.

    The parameters that it was fitted with are left out: no prediction asks for them, and odd ones end the process."""
    require_whole(text)
    return whole_booster(text)


def require_whole(text: str) -> None:
    """Raise `ValueError` for a text that is not whole, before anything reads it."""
    if hashlib.sha256(text.encode()).hexdigest() not in _vouched and (problem := problem_of_text(text)) is not None:
        raise ValueError(problem)


def whole_booster(text: str) -> lightgbm.Booster:
    """`booster_of` for a text that `require_whole` has taken."""
    import lightgbm

    trees, end, _ = unnumbered(text).partition(f"\n{_END}\n")
    return lightgbm.Booster(model_str=f"{trees}{end}\npandas_categorical:null\n")


def vouch(sha256: str) -> None:
    """Say that the text of that checksum came with the project: whatever it holds has been checked before."""
    _vouched.add(sha256)


def problem_of_text(text: str) -> str | None:
    """Why the text must not be given to LightGBM, or None. A first line with one number, which `Boosted` puts before
    it, is skipped."""
    first = text.partition("\n")[0]
    if first != "tree" and (not re.fullmatch(r"[-+.\deE]{1,40}", first) or not math.isfinite(_number(first))):
        return "it begins with neither `tree` nor a number"
    try:
        return _problem(unnumbered(text))
    except (ValueError, OverflowError, KeyError) as error:
        return f"it is not whole: {type(error).__name__}: {str(error)[:80]}"


def unnumbered(text: str) -> str:
    """Return the text as LightGBM wrote it, without the number that `Boosted` puts before it."""
    return text if text.startswith("tree\n") else text.partition("\n")[2]


def _problem(text: str) -> str | None:
    header, gap, body = text.partition("\n\n")
    if not header.startswith("tree\n") or not gap:
        return "it has no header"
    about = _keys(header.split("\n")[1:])
    if about["num_class"] != "1" or about["num_tree_per_iteration"] != "1":
        return "it is not a regression"
    features = _int(about["max_feature_idx"]) + 1
    if _int(about["label_index"]) >= features:
        return "its label is a feature that it does not have"
    if not 0 < features <= 1_000_000 or len(about["feature_names"].split(" ")) != features:
        return f"it has not the names of {features} features"
    sizes = [_int(size) for size in about["tree_sizes"].split(" ")] if about["tree_sizes"] else []
    if len(sizes) > _MOST_TREES or min(sizes, default=1) < 1:
        return "its trees have no sizes"
    # LightGBM goes from tree to tree by these sizes, in bytes: what it writes has one byte a character.
    if not text.isascii():
        return "it has other characters than LightGBM writes"
    trees, at = [], 0
    for index, size in enumerate(sizes):
        block = body[at : at + size]
        if len(block) != size or not block.startswith(f"Tree={index}\n") or not block.endswith("\n"):
            return f"tree {index} of {len(sizes)} is cut or not where it should be"
        trees.append(_keys(block.split("\n")[1:]))
        at += size
    rest = body[at:].lstrip("\n")
    if not rest.startswith(f"{_END}\n") or _END_OF_ALL not in rest or not rest.endswith("\n"):
        return f"it does not say `{_END}` after its last tree, or ends before its parameters do"
    for index, tree in enumerate(trees):
        if (problem := _problem_of_shape(tree)) is not None:
            return f"tree {index}: {problem}"
    return _problem_of_values(trees, features) if trees else None


def _keys(lines: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for line in lines:
        if line:
            key, equals, value = line.partition("=")
            if key in values:
                raise ValueError(f"{key} is there twice")
            values[key] = value if equals else ""
    return values


def _problem_of_shape(tree: Mapping[str, str]) -> str | None:
    """Whether every array of a tree has as many values as the tree has nodes or leaves."""
    leaves, categories = _int(tree["num_leaves"]), _int(tree["num_cat"])
    if not 1 <= leaves <= _MOST_LEAVES or categories < 0 or tree.get("is_linear", "0") != "0":
        return "it has no leaves, or such as this code does not use"
    for name, value in tree.items():
        if name in _WHOLE and not _INTEGERS.fullmatch(value):
            return f"{name} holds a value that is not a whole number"
        if name in _OTHERS or name in _CATEGORIES:
            continue
        if name not in _NODES and name not in _LEAVES:
            return f"unknown {name[:40]!r}"
        if not _NUMBERS.fullmatch(value):
            return f"{name} holds a value that is not a number"
        count = value.count(" ") + 1 if value else 0
        expected = leaves if name in _LEAVES else leaves - 1
        if count != expected and (leaves > 1 or count > 1) and (value or name in _NEEDED):
            return f"{name} has {count} values, not {expected}"
    if missing := [name for name in _NEEDED if name not in tree]:
        return f"it has no {missing[0]}"
    return None


def _problem_of_values(trees: Sequence[Mapping[str, str]], features: int) -> str | None:
    """Whether the values of all trees, one tree after the other, are figures and make trees."""
    for name in (*_NODES, *_LEAVES, "shrinkage"):  # also what no prediction reads: LightGBM parses it
        texts = [tree[name] for tree in trees if tree.get(name)]
        values = _numbers(texts)
        if len(values) != sum(text.count(" ") + 1 for text in texts):
            return f"{name} holds a value that is not a number"
        if name == "leaf_value" and not np.isfinite(values).all():
            return "leaf_value holds a value that is not a number"
    grown = [tree for tree in trees if int(tree["num_leaves"]) > 1]
    if not grown:
        return None
    leaves = np.array([int(tree["num_leaves"]) for tree in grown])
    total = int((leaves - 1).sum())
    columns = {name: _numbers([tree[name] for tree in grown]) for name in _NEEDED if name in _NODES}
    for name, values in columns.items():
        if len(values) != total or np.isnan(values).any():
            return f"{name} holds a value that is not a number"
    split, kind, left, right = (
        _whole(columns[name]) for name in ("split_feature", "decision_type", "left_child", "right_child")
    )
    if split.min() < 0 or split.max() >= features or kind.min() < 0 or kind.max() > 15:
        return "a tree splits on a feature or in a way that does not exist"
    first = np.concatenate([[0], np.cumsum(leaves - 1)])
    own = np.arange(total) - np.repeat(first[:-1], leaves - 1)
    # Inner nodes are numbered as they were split, so a child has a higher number; leaves are -1, -2, ...
    if ((left >= 0) & (left <= own)).any() or ((right >= 0) & (right <= own)).any():
        return "the nodes of a tree point backwards"
    for tree, low, high in zip(grown, first[:-1].tolist(), first[1:].tolist(), strict=True):
        count = high - low + 1
        children = np.sort(np.concatenate([left[low:high], right[low:high]]))
        if not np.array_equal(children, np.concatenate([np.arange(-count, 0), np.arange(1, count - 1)])):
            return "the tree structure is invalid"
        thresholds = columns["threshold"][low:high][kind[low:high] & _CATEGORICAL == 1]
        if (problem := _problem_of_categories(tree, int(tree["num_cat"]), thresholds)) is not None:
            return problem
    return None


def _numbers(texts: Sequence[str]) -> np.ndarray:
    """The numbers of texts that hold some, separated by spaces; none where one of them is no number."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # older numpy warns of what is no number
            return np.fromstring(" ".join(texts), sep=" ") if texts else np.empty(0)
    except (ValueError, DeprecationWarning):
        return np.empty(0)


def _problem_of_categories(tree: Mapping[str, str], categories: int, thresholds: np.ndarray) -> str | None:
    if not categories:
        return "it splits by categories that it does not have" if len(thresholds) else None
    bounds = _whole(np.array(tree["cat_boundaries"].split(), dtype=float))
    words = _whole(np.array(tree["cat_threshold"].split(), dtype=float))
    if len(bounds) != categories + 1 or bounds[0] != 0 or (np.diff(bounds) < 1).any() or bounds[-1] != len(words):
        return "its categories have no bounds"
    if words.min(initial=0) < 0 or words.max(initial=0) >= 2**32:
        return "invalid category bitset"
    used = _whole(thresholds)
    return None if ((used >= 0) & (used < categories)).all() else "it splits by categories that it does not have"


def _whole(values: np.ndarray) -> np.ndarray:
    """The same as integers; `ValueError` where they are none."""
    if not np.isfinite(values).all() or (values != np.floor(values)).any() or (np.abs(values) > 2**40).any():
        raise ValueError("an index is not a whole number")
    return values.astype(np.int64)


def _int(text: str) -> int:
    """`int`, of nothing but digits: LightGBM reads other spellings otherwise."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError("a count is not a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
