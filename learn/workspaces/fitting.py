"""Fits trees on cuDNN's answers: which formula a workspace follows, and the bytes of those that follow none.

Start reading at `fitted_operation`; `save` writes the file that `featurize.cudnn.distilled` reads.
"""

from __future__ import annotations

import io
import json
import zipfile
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
    PARTIAL_FORMULAS,
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
_SLACK_BESIDE_PARTIALS = 0.001  # less: most numbers are near some multiple of a small weight
_SLACK_BYTES_BESIDE_PARTIALS = 4096
_LEAST_SHARE_WITH_PARTIALS = 0.02
_MOST_PARTIALS = 1024
# Where channels are multiples of 32 all paddings give the same. One that pads little errs little where it is wrong.
_PREFERENCE = {"exact": 1.0, "padded": 1.0, "by group": 1.0, "by group of 32": 0.8}
_LEAVES = 24
_DEPTH = 12
_TREES_OF_A_LOGARITHM = 80


def described_rows(rows: LabelledWorkspaces) -> DescribedConvolutions:
    """Return what decides the workspaces of labelled rows."""
    return described(rows.signatures, allow_tf32=rows.allow_tf32, sm_count=rows.sm_count)


def kinds_of(
    convolutions: DescribedConvolutions, nbytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[WorkspaceFormula, ...]]:
    """Return (n,) the kind of each workspace, (n,) its number of partial sums, and the formulas that explain enough.

    Where several formulas give the same bytes, the one that explains most of the rows left is taken, and one without
    partial sums before those with some.
    """
    kinds, partials = np.full(len(nbytes), OTHER), np.zeros(len(nbytes))
    kinds[nbytes == 0] = NOTHING
    kinds[np.isnan(nbytes)] = NO_ENGINE
    kinds[(nbytes > 0) & (nbytes < SMALL_BYTES)] = SMALL
    chosen: list[WorkspaceFormula] = []
    for formulas, least_share in ((FORMULAS, _LEAST_SHARE), (PARTIAL_FORMULAS, _LEAST_SHARE_WITH_PARTIALS)):
        explained_by = {formula: _explained(convolutions, nbytes, formula) for formula in formulas}
        while True:
            left = kinds == OTHER
            counts = {formula: int((explained_by[formula][0] & left).sum()) for formula in formulas}
            best = max(formulas, key=lambda formula: counts[formula] * _PREFERENCE[formula.padding])
            explained = explained_by[best][0] & left
            if explained.sum() < max(_LEAST_ROWS, least_share * len(nbytes)):
                break
            kinds[explained] = FIRST_FORMULA + len(chosen)
            partials[explained] = explained_by[best][1][explained]
            chosen.append(best)
    return kinds, partials, tuple(chosen)


def _explained(
    convolutions: DescribedConvolutions, nbytes: np.ndarray, formula: WorkspaceFormula
) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) whether a formula gives the bytes, and (n,) with how many partial sums."""
    beyond = nbytes - convolutions.bytes_of(formula)
    if not formula.partials:
        return (beyond >= -1) & (beyond <= np.maximum(_SLACK * nbytes, _SLACK_BYTES)), np.zeros(len(nbytes))
    each = convolutions.partial_bytes[formula.padding]
    number = np.floor((beyond + 1) / each)
    rest = beyond - number * each
    whole = rest <= np.minimum(_SLACK_BESIDE_PARTIALS * nbytes + _SLACK_BYTES_BESIDE_PARTIALS, each / 4)
    return (number >= 1) & (number <= _MOST_PARTIALS) & whole, number


def fitted_operation(rows: LabelledWorkspaces, *, rounds: int, seed: int, halves_differ: bool = True) -> OperationModel:
    """Fit one operation on one compute capability, in one thread.

    Args:
        rows: Its labels.
        rounds: Trees of each kind.
        seed: Of LightGBM.
        halves_differ: Whether cuDNN treats bf16 unlike fp16, as on GPUs without tensor cores for it. Elsewhere each
            type has more to learn from where the trees do not tell the two apart.
    """
    import lightgbm

    convolutions = described_rows(rows)
    if not halves_differ:
        convolutions.features[:, FEATURES.index("bfloat16")] = 0  # of one value, no tree asks for it
    kinds, partials, formulas = kinds_of(convolutions, rows.nbytes)
    common: dict[str, Any] = {
        "num_leaves": _LEAVES, "max_depth": _DEPTH, "learning_rate": 0.12, "min_data_in_leaf": _LEAST_ROWS,
        "verbose": -1, "num_threads": 1, "seed": seed, "deterministic": True, "force_row_wise": True,
    }  # fmt: skip

    def logarithm_trees(chosen: np.ndarray, values: np.ndarray) -> PackedTrees:
        """Return trees for the logarithm of positive values; of no row, trees that are never asked."""
        table, target = convolutions.features[chosen], np.log2(values[chosen])
        if not chosen.any():
            table, target = convolutions.features[:1], np.zeros(1)
        booster = lightgbm.train(
            {**common, "objective": "l1"}, lightgbm.Dataset(table, target), num_boost_round=_TREES_OF_A_LOGARITHM
        )
        return packed(booster, 1, np.float32)

    outputs = FIRST_FORMULA + len(formulas)
    by_kind = lightgbm.train(
        {**common, "objective": "multiclass", "num_class": outputs},
        lightgbm.Dataset(convolutions.features, kinds),
        num_boost_round=rounds,
    )
    small = rows.nbytes[kinds == SMALL]
    return OperationModel(
        kinds=packed(by_kind, outputs, np.float16),
        formulas=formulas,
        small=int(np.median(small)) if len(small) else 0,
        logarithm=logarithm_trees(kinds == OTHER, rows.nbytes),
        partials=logarithm_trees(partials > 0, partials),
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
            arrays |= operations[operation].partials.to_arrays(f"{name}/{operation}/partials/")
    content = {**about, "format": FORMAT, "features": FEATURES, "models": described_models}
    write_bytes(path, _compressed({"about": np.array(json.dumps(content)), **arrays}))


def _compressed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a file as `numpy.load` reads it. The time in it is fixed, so that equal arrays make equal files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()
