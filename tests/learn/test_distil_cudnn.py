"""Distilling: formulas are recovered from bytes, trees answer as LightGBM's, and what is written is read."""

import json
import random

import numpy as np
import pytest

from conf.errors import UsageError
from featurize.cudnn.distilled import FIRST_FORMULA, NO_ENGINE, NOTHING, OTHER, SMALL, distilled_for
from featurize.cudnn.signature import OPERATIONS, ConvolutionSignature, SearchSettings, require_signature
from featurize.cudnn.workspace_formulas import FEATURES, WorkspaceFormula
from featurize.device_spec import load_device
from learn.workspaces.fitting import described_rows, fitted_operation, kinds_of, packed, save
from learn.workspaces.judging import judged, table_of
from learn.workspaces.labels import (
    LabelledWorkspaces,
    convolutions_of_runs,
    depthwise_convolutions,
    every_operation,
    neighbours,
    plain_convolutions,
)
from warehouse.folder import DataFolder

A100 = load_device("A100-SXM4-40GB")
COPIES = WorkspaceFormula("exact", 1, 1, 1)


def convolution(draw, operation="forward"):
    batch, side = draw.randrange(1, 65), draw.choice((7, 14, 28, 56))
    channels, filters, size = draw.randrange(3, 300), draw.randrange(8, 300), draw.choice((1, 3))
    dtype, last = draw.choice(("float32", "float16")), draw.random() < 0.5
    return ConvolutionSignature(
        operation, (batch, channels, side, side), (filters, channels, size, size), (batch, filters, side, side),
        (1, 1), (size // 2,) * 2, (1, 1), dtype, last,
    )  # fmt: skip


@pytest.fixture(scope="module")
def labels():
    """Workspaces as a simple library would take them: none for products, copies where the layout is not the kernel's,
    eleven bytes an output element in fp32."""
    draw = random.Random(0)
    signatures = tuple(dict.fromkeys(convolution(draw) for _ in range(1500)))
    rows = LabelledWorkspaces(
        signatures, np.full(len(signatures), True), np.full(len(signatures), 108), np.zeros(len(signatures))
    )
    copies = described_rows(rows).bytes_of(COPIES)
    for place, signature in enumerate(signatures):
        if signature.kernel[2] == 1:
            continue
        if signature.dtype == "float32":
            rows.nbytes[place] = 11 * np.prod(signature.response) + 2**16
        else:
            rows.nbytes[place] = 1000 if signature.channels_last else copies[place] + 16
    return rows


@pytest.fixture(scope="module")
def model(labels):
    return fitted_operation(labels, rounds=20, seed=0)


def test_formulas_are_recovered_from_bytes(labels):
    nbytes = labels.nbytes.copy()
    nbytes[0] = np.nan
    kinds, _, formulas = kinds_of(described_rows(labels), nbytes)
    assert COPIES in [formula._replace(padding="exact") for formula in formulas]
    assert kinds[0] == NO_ENGINE
    for kind, size, signature in list(zip(kinds, labels.nbytes, labels.signatures, strict=True))[1:]:
        if size == 0:
            assert kind == NOTHING
        elif signature.dtype == "float16":
            assert kind == SMALL if signature.channels_last else kind >= FIRST_FORMULA
    assert (kinds == OTHER).sum() > 200


def test_partial_sums_are_counted_beside_the_copies_of_their_formula(labels):
    convolutions = described_rows(labels)
    numbers = np.arange(len(labels.signatures)) % 30 + 2
    nbytes = convolutions.bytes_of(COPIES) + numbers * convolutions.partial_bytes["exact"] + 512
    kinds, partials, formulas = kinds_of(convolutions, nbytes)
    of_partials = {FIRST_FORMULA + place for place, formula in enumerate(formulas) if formula.partials}
    large = convolutions.partial_bytes["exact"] > 2**18  # of a small weight, many numbers fit
    counted = np.isin(kinds, list(of_partials)) & large
    assert counted.sum() > 0.6 * large.sum()
    assert (partials[counted] == numbers[counted]).mean() > 0.8
    assert not partials[~np.isin(kinds, list(of_partials))].any()


def test_packed_trees_answer_as_lightgbm_does(labels):
    import lightgbm

    table = described_rows(labels).features
    parameters = {"objective": "regression", "num_leaves": 20, "verbose": -1, "num_threads": 1}
    booster = lightgbm.train(parameters, lightgbm.Dataset(table, np.log1p(labels.nbytes)), num_boost_round=15)
    answers = packed(booster, 1, np.float32).scores(table)[:, 0]
    np.testing.assert_allclose(answers, booster.predict(table), rtol=1e-5, atol=1e-4)
    constant = lightgbm.train(parameters, lightgbm.Dataset(table[:3], np.full(3, 7.0)), num_boost_round=2)
    np.testing.assert_allclose(packed(constant, 1, np.float32).scores(table[:5])[:, 0], 7.0)


def test_what_was_fitted_is_written_read_and_names_the_classes_of_other_convolutions(labels, model, tmp_path):
    path = tmp_path / "weights.npz"
    save({(8, 0): dict.fromkeys(OPERATIONS, model)}, path, {"cudnn": "9.99.0"})
    distilled = distilled_for(A100, path)
    assert (distilled.cudnn, distilled.capability) == ("9.99.0", (8, 0))
    draw = random.Random(1)
    unseen = [one for one in (convolution(draw) for _ in range(300)) if one not in set(labels.signatures)]
    answers = distilled.workspaces(unseen, SearchSettings())
    none = [answers[one] for one in unseen if one.kernel[2] == 1]
    assert none.count(0) > 0.95 * len(none)
    copies = [one for one in unseen if one.kernel[2] == 3 and one.dtype == "float16" and not one.channels_last]
    expected = [2 * sum(map(np.prod, (one.image, one.kernel, one.response))) for one in copies]
    right = [abs(answers[one] / size - 1) < 0.02 for one, size in zip(copies, expected, strict=True)]
    assert sum(right) > 0.9 * len(right)
    scores = judged(A100, labels, distilled)
    assert [score.source for score in scores] == ["distilled", "guessed"]
    assert scores[0].class_share > 0.9 > scores[1].class_share
    assert table_of(scores).count("\n") == 2 and "A100-SXM4-40GB" in table_of(scores)


def test_neighbours_are_convolutions_of_the_same_kernel_and_come_again(labels):
    draw = random.Random(2)
    base = [convolution(draw) for _ in range(40)]
    base.append(base[0]._replace(image=(4, 32, 9, 9), kernel=(32, 1, 3, 3), response=(4, 32, 9, 9), padding=(1, 1)))
    others = list(neighbours(base, 3, seed=0))
    assert others == list(neighbours(base, 3, seed=0)) and len(set(others)) > 120
    for other in others:
        require_signature(other)
        assert other.kernel[2:] in {one.kernel[2:] for one in base}
    assert len(every_operation(base)) == 3 * len(set(base))


def test_plain_convolutions_are_whole_tiles_of_square_images():
    plain = list(plain_convolutions(200, seed=0))
    assert plain == list(plain_convolutions(200, seed=0)) and len(plain) > 190
    for one in map(require_signature, plain):
        assert one.groups == 1 and one.image[2] == one.image[3] and one.image[1] in (3, *range(8, 4097, 8))
    assert {one.kernel[2] for one in plain} == {1, 3, 5, 7} and {one.channels_last for one in plain} == {False, True}


def test_depthwise_convolutions_are_in_the_layout_in_which_cudnn_runs_them():
    for one in map(require_signature, depthwise_convolutions(100, seed=0)):
        assert one.groups == one.image[1] == one.kernel[0] and one.channels_last


def test_a_folder_without_runs_of_the_family_says_what_to_run(tmp_path):
    folder = DataFolder.resolve(tmp_path / "data").create()
    with pytest.raises(UsageError, match=r"holds 0 convolutions .*farm\.submit \+arch=cudnn"):
        convolutions_of_runs(folder)


def test_features_have_one_name_each():
    assert len(set(FEATURES)) == len(FEATURES) <= 256
    assert json.loads(json.dumps(FEATURES)) == list(FEATURES)
