"""Fits trees on cuDNN's answers: which formula a workspace follows, and the bytes of those that follow none.

Start reading at `fitted_operation`; `save` writes the file that `featurize.cudnn.distilled` reads.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from featurize.cudnn.distilled import (
    FIRST_FORMULA,
    FORMAT,
    NO_ENGINE,
    NOTHING,
    OTHER,
    SMALL,
    OperationModel,
)
from featurize.cudnn.packed_trees import PackedTrees
from featurize.cudnn.signature import OPERATIONS
from featurize.cudnn.workspace_formulas import (
    FEATURES,
    FORMULAS,
    SMALL_BYTES,
    DescribedConvolutions,
    WorkspaceFormula,
    described,
)
from learn.workspaces.labels import LabelledWorkspaces
from warehouse.layout import write_bytes

_SLACK = 0.012  # share of a workspace that may be tables and counters beside the copies
_SLACK_BYTES = 70_000
_LEAST_SHARE = 0.004  # of an operation's rows, to keep a formula
_LEAST_ROWS = 5
_LEAVES = 24
_DEPTH = 12
_TREES_OF_OTHERS = 100


def described_rows(rows: LabelledWorkspaces) -> DescribedConvolutions:
    """Return what decides the workspaces of labelled rows."""
    return described(rows.signatures, allow_tf32=rows.allow_tf32, sm_count=rows.sm_count)


def kinds_of(
    convolutions: DescribedConvolutions, nbytes: np.ndarray
) -> tuple[np.ndarray, tuple[WorkspaceFormula, ...]]:
    """Return (n,) the kind of each workspace, and the formulas that explain enough of them, the commonest first.

    Where several formulas give the same bytes, the one that explains most of the rows left is taken.
    """
    kinds = np.full(len(nbytes), OTHER)
    kinds[nbytes == 0] = NOTHING
    kinds[np.isnan(nbytes)] = NO_ENGINE
    kinds[(nbytes > 0) & (nbytes < SMALL_BYTES)] = SMALL
    left = kinds == OTHER
    slack = np.maximum(_SLACK * nbytes, _SLACK_BYTES)
    explains = {}
    for formula in FORMULAS:
        beyond = nbytes - convolutions.bytes_of(formula)
        explains[formula] = left & (beyond >= -1) & (beyond <= slack)
    chosen: list[WorkspaceFormula] = []
    while True:
        best = max(FORMULAS, key=lambda formula: int((explains[formula] & left).sum()))
        explained = explains[best] & left
        if explained.sum() < max(_LEAST_ROWS, _LEAST_SHARE * len(nbytes)):
            return kinds, tuple(chosen)
        kinds[explained] = FIRST_FORMULA + len(chosen)
        chosen.append(best)
        left &= ~explained


def fitted_operation(rows: LabelledWorkspaces, *, rounds: int, seed: int, threads: int) -> OperationModel:
    """Fit one operation on one compute capability.

    Args:
        rows: Its labels.
        rounds: Trees of each kind.
        seed: Of LightGBM.
        threads: Of LightGBM.
    """
    import lightgbm

    convolutions = described_rows(rows)
    kinds, formulas = kinds_of(convolutions, rows.nbytes)
    common: dict[str, Any] = {
        "num_leaves": _LEAVES, "max_depth": _DEPTH, "learning_rate": 0.1, "min_data_in_leaf": _LEAST_ROWS,
        "verbose": -1, "num_threads": threads, "seed": seed, "deterministic": True, "force_row_wise": True,
    }  # fmt: skip
    outputs = FIRST_FORMULA + len(formulas)
    by_kind = lightgbm.train(
        {**common, "objective": "multiclass", "num_class": outputs},
        lightgbm.Dataset(convolutions.features, kinds),
        num_boost_round=rounds,
    )
    others = kinds == OTHER
    table, logarithm = convolutions.features[others], np.log2(rows.nbytes[others])
    if not others.any():  # trees of nothing: they are never asked
        table, logarithm = convolutions.features[:1], np.zeros(1)
    of_others = lightgbm.train(
        {**common, "objective": "l1"}, lightgbm.Dataset(table, logarithm), num_boost_round=_TREES_OF_OTHERS
    )
    small = rows.nbytes[kinds == SMALL]
    return OperationModel(
        kinds=packed(by_kind, outputs, np.float16),
        formulas=formulas,
        small=int(np.median(small)) if len(small) else 0,
        logarithm=packed(of_others, 1, np.float32),
    )


def packed(booster: Any, outputs: int, leaf_type: type[np.floating]) -> PackedTrees:
    """Return a fitted LightGBM model as small arrays.

    Args:
        booster: `lightgbm.Booster` of numeric features without missing values.
        outputs: Values that it gives for a row.
        leaf_type: Of the leaves.
    """
    trees = [tree["tree_structure"] for tree in booster.dump_model()["tree_info"]]
    flat = [_flat(tree) for tree in trees]
    thresholds: list[set[float]] = [set() for _ in FEATURES]
    for inner, _ in flat:
        for node in inner:
            thresholds[node["feature"]].add(node["threshold"])
    ascending = [np.array(sorted(values)) for values in thresholds]
    most_inner = max(1, *(len(inner) for inner, _ in flat))
    shape = (len(flat), most_inner)
    arrays = {
        name: np.full(shape, -1 if name in ("left", "right") else 0) for name in ("feature", "rank", "left", "right")
    }
    leaves = np.zeros((len(flat), most_inner + 1), dtype=leaf_type)
    for place, (inner, values) in enumerate(flat):
        leaves[place, : len(values)] = values
        for number, node in enumerate(inner):
            arrays["feature"][place, number] = node["feature"]
            arrays["rank"][place, number] = np.searchsorted(ascending[node["feature"]], node["threshold"])
            arrays["left"][place, number], arrays["right"][place, number] = node["left"], node["right"]
    return PackedTrees(
        thresholds=np.concatenate(ascending),
        counts=np.array([len(values) for values in ascending], dtype=np.int16),
        feature=arrays["feature"].astype(np.uint8),
        rank=arrays["rank"].astype(np.uint8),
        left=arrays["left"].astype(np.int8),
        right=arrays["right"].astype(np.int8),
        leaves=leaves,
        outputs=outputs,
    )


def _flat(root: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
    """Return a tree's inner nodes, the root first, and its leaves; children as `PackedTrees` numbers them."""
    inner: list[dict[str, Any]] = []
    leaves: list[float] = []

    def add(node: Mapping[str, Any]) -> int:
        if "leaf_value" in node and "split_feature" not in node:
            leaves.append(node["leaf_value"])
            return -len(leaves)
        number = len(inner)
        inner.append({"feature": node["split_feature"], "threshold": node["threshold"]})
        inner[number]["left"] = add(node["left_child"])
        inner[number]["right"] = add(node["right_child"])
        return number

    if add(root) < 0:  # a tree of one leaf: both children of a node that asks nothing
        inner.append({"feature": 0, "threshold": 0.0, "left": -1, "right": -1})
    return inner, leaves


def save(models: Mapping[tuple[int, int], Mapping[str, OperationModel]], path: Path, about: Mapping[str, Any]) -> None:
    """Write the models of all compute capabilities into one file, at once.

    Args:
        models: Capability -> operation -> its model.
        path: The file.
        about: What else it records: at least `cudnn`, the version that answered.
    """
    arrays: dict[str, np.ndarray] = {}
    described_models: dict[str, dict[str, Any]] = {}
    for (major, minor), operations in models.items():
        name = f"{major}.{minor}"
        described_models[name] = {
            operation: {"formulas": operations[operation].formulas, "small": operations[operation].small}
            for operation in OPERATIONS
        }
        for operation in OPERATIONS:
            arrays |= operations[operation].kinds.to_arrays(f"{name}/{operation}/kinds/")
            arrays |= operations[operation].logarithm.to_arrays(f"{name}/{operation}/logarithm/")
    content = {**about, "format": FORMAT, "features": FEATURES, "models": described_models}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, about=np.array(json.dumps(content)), **arrays)
    write_bytes(path, buffer.getvalue())
