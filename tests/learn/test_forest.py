"""Extra trees as arrays: the same figures as scikit-learn's, missing values included."""

import json

import numpy as np
import pytest
from learn_rows import DEVICE, labels_of, make_configs
from sklearn.ensemble import ExtraTreesRegressor

from learn.cases import Case
from learn.data import make_rows
from learn.estimators import make_estimator
from learn.learned.forest import TreeArrays


@pytest.fixture(scope="module")
def rows():
    configs = make_configs(80)
    return make_rows("memory", configs, labels_of(configs)["peak_memory_mib"])


@pytest.fixture(scope="module")
def fitted(rows):
    return make_estimator("forest", seed=1).fit(rows)


def test_arrays_predict_what_scikit_learn_predicts(tmp_path):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((300, 6))
    table[rng.random(table.shape) < 0.2] = np.nan
    table[:, 5] = np.float32(0.1)  # a threshold that float32 can't hold lies between equal values
    table[::2, 5] = np.nextafter(np.float32(0.1), np.float32(1))
    label = np.nansum(table[:, :5], axis=1) + 1e6 * (table[:, 5] > np.float32(0.1))
    forest = ExtraTreesRegressor(20, random_state=0).fit(table, label)
    arrays = TreeArrays.of(forest.estimators_)
    asked = np.vstack([table, np.full((1, 6), np.nan), 100 * rng.standard_normal((200, 6))])
    np.testing.assert_array_equal(arrays.predict(asked), forest.predict(asked))
    arrays.save(tmp_path / "forest.npz")
    np.testing.assert_array_equal(TreeArrays.load(tmp_path / "forest.npz").predict(asked), forest.predict(asked))


def test_two_families_in_one_table_are_told_apart_by_what_each_lacks(fitted, rows):
    error = np.abs(fitted.predict(rows.cases).point / rows.label - 1)
    assert np.isnan(fitted._table.matrix(rows.cases)).any()
    assert np.median(error) < 0.1


def test_device_features_are_among_the_columns(fitted, tmp_path):
    fitted.save(tmp_path)
    columns = json.loads((tmp_path / "estimator.json").read_text())["features"]["columns"]
    assert any(name.startswith("gpu_") for name in columns) and "batch_size" in columns


@pytest.mark.parametrize("name", ["forest", "lightgbm"])
def test_a_module_is_refused_and_the_others_are_answered(name, rows):
    from torch import nn

    from learn.workload import of_module

    job = of_module(lambda: nn.Linear(8, 2), inputs=(4, 8))
    answer = make_estimator(name).fit(rows).predict([rows.cases[0], Case(device=DEVICE, module=job)])
    assert list(answer.refusals) == [1] and "module" in answer.refusals[1]
    assert np.isfinite(answer.point[0]) and np.isnan(answer.point[1])
