"""Saved LightGBM models answer without LightGBM, with its very figures."""

import subprocess
import sys
from pathlib import Path

import lightgbm
import numpy as np
import pytest

import learn
from learn.learned.tree_model import SavedBooster, TreeModel, UnknownTreeModel

SHIPPED = sorted((Path(learn.__file__).parent / "default_models").glob("*/model/*.txt"))


def table_of(columns, rows=300, seed=0):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-3, 5, size=(rows, columns))
    table[rng.random(table.shape) < 0.1] = np.nan
    table[rng.random(table.shape) < 0.2] = 0.0
    table[rng.random(table.shape) < 0.02] = np.inf
    return table


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_model_that_comes_along_answers_as_lightgbm_does(path):
    text = path.read_text().partition("\n")[2]
    booster = lightgbm.Booster(model_str=text)
    table = table_of(booster.num_feature())
    assert np.array_equal(TreeModel.parse(text).predict(table), booster.predict(table, num_threads=1))


@pytest.mark.parametrize("parameters", [
    {}, {"use_missing": False}, {"zero_as_missing": True}, {"num_leaves": 2}, {"num_leaves": 63, "max_depth": 20},
    {"min_data_in_leaf": 10_000},  # no tree has a second leaf
])  # fmt: skip
def test_a_fitted_model_answers_as_lightgbm_does(parameters):
    rows = table_of(6, seed=1)
    label = np.nan_to_num(rows[:, 0]) % 7 + np.isnan(rows[:, 1])
    about = {"verbosity": -1, "min_data_in_leaf": 2, "num_threads": 1, "objective": "quantile", **parameters}
    booster = lightgbm.train(about, lightgbm.Dataset(rows, label), num_boost_round=30)
    table = table_of(6, seed=2)
    assert np.array_equal(TreeModel.parse(booster.model_to_string()).predict(table), booster.predict(table))


def test_what_is_not_read_here_is_left_to_lightgbm():
    rows = np.random.default_rng(0).integers(0, 9, size=(2000, 2)).astype(float)
    about = {"verbosity": -1, "min_data_in_leaf": 2, "min_data_per_group": 2, "cat_smooth": 0, "num_threads": 1}
    data = lightgbm.Dataset(rows, 5 * (rows[:, 0] % 2), params=about, categorical_feature=[0])
    booster = lightgbm.train(about, data, num_boost_round=5)
    with pytest.raises(UnknownTreeModel):
        TreeModel.parse(booster.model_to_string())
    assert np.array_equal(SavedBooster(booster.model_to_string()).predict(rows), booster.predict(rows))


def test_a_few_rows_import_no_lightgbm_and_many_do():
    code = f"""
import sys
import numpy as np
from learn.learned.tree_model import SavedBooster
model = SavedBooster(open({str(SHIPPED[0])!r}).read().partition("\\n")[2])
few = model.predict(np.zeros((3, 99)))
print("lightgbm" in sys.modules)
many = model.predict(np.zeros((20_000, 99)))
print("lightgbm" in sys.modules, bool((many == few[0]).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
