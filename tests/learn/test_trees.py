"""Trees as arrays answer without LightGBM and scikit-learn, with their very figures; what makes no trees is refused."""

import lightgbm
import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor
from torch import nn

from learn.estimators.protocol import make_estimator
from learn.estimators.trees import Boosters, Trees
from learn.fitting.artifacts import DEFAULT_MODELS
from learn.job.training_job import Case, of_module
from tests.learn.learn_rows import DEVICE, labels_of, make_configs, make_rows

SHIPPED = [
    (DEFAULT_MODELS / target / "model", name) for target in ("memory", "smact") for name in ("correction", "scale")
]
QUIET = {"verbosity": -1, "num_threads": 1, "min_data_in_leaf": 2}


def table_of(columns, rows=300, seed=0):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-3, 5, size=(rows, columns))
    table[rng.random(table.shape) < 0.1] = np.nan
    table[rng.random(table.shape) < 0.2] = 0.0
    table[rng.random(table.shape) < 0.02] = np.inf
    return table


def booster_of(seed=1, **about):
    rows = table_of(6, seed=seed)
    label = np.nan_to_num(rows[:, 0]) % 7 + np.isnan(rows[:, 1])
    about = {**QUIET, "objective": "quantile", **about}
    return lightgbm.train(about, lightgbm.Dataset(rows, label), num_boost_round=30)


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"use_missing": False},
        {"num_leaves": 2},
        {"num_leaves": 63, "max_depth": 20},
        {"objective": "regression"},
        {"min_data_in_leaf": 10_000},  # no tree has a second leaf
    ],
)
def test_trees_answer_as_lightgbm_does(about):
    booster = booster_of(**about)
    trees, table = Trees.of_lightgbm([booster]), table_of(6, rows=5000, seed=2)
    assert np.array_equal(trees.predict(table), booster.predict(table))
    table[:, 4], table[:, 5] = np.nan, np.where(np.arange(5000) % 2, np.nan, 5.0)
    for rows in (table[:1], table[:8], table[:300]):
        assert np.array_equal(trees.predict(rows), booster.predict(rows))


@pytest.mark.parametrize("categories", [2, 5, 90])
def test_splits_by_categories_answer_as_lightgbm_does(categories):
    rng = np.random.default_rng(0)

    def drawn(most):
        table = rng.integers(0, most, size=(2000, 3)).astype(float)
        table[rng.random(table.shape) < 0.1] = np.nan
        return table

    rows = drawn(categories)
    about = {**QUIET, "min_data_per_group": 2, "cat_smooth": 0}
    label = 5 * (np.nan_to_num(rows[:, 0]) % 2) + (rows[:, 1] % 3 == 1)
    data = lightgbm.Dataset(rows, label, params=about, categorical_feature=[0, 1])
    booster = lightgbm.train(about, data, num_boost_round=10)
    assert "cat_threshold" in booster.model_to_string()
    table = drawn(categories + 40)
    assert np.array_equal(Trees.of_lightgbm([booster]).predict(table), booster.predict(table))


def test_the_mean_of_boosters_is_kept_with_its_start(tmp_path):
    boosters = Boosters([booster_of(seed) for seed in (1, 2, 3)], start=-0.3)
    boosters.trees().save(tmp_path, "three")
    table = table_of(6)
    assert np.array_equal(Trees.load(tmp_path, "three").predict(table), boosters.predict(table))


def test_a_forest_answers_as_scikit_learn_does(tmp_path):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((300, 6)).astype(np.float32)
    table[rng.random(table.shape) < 0.2] = np.nan
    table[:, 5] = np.float32(0.1)  # a threshold that float32 can't hold lies between equal values
    table[::2, 5] = np.nextafter(np.float32(0.1), np.float32(1))
    label = np.nansum(table[:, :5], axis=1) + 1e6 * (table[:, 5] > np.float32(0.1))
    forest = ExtraTreesRegressor(20, random_state=0).fit(table, label)
    Trees.of_scikit_learn(forest.estimators_).save(tmp_path, "forest")
    asked = np.vstack([table, np.full((1, 6), np.nan), 100 * rng.standard_normal((200, 6))]).astype(np.float32)
    assert np.array_equal(Trees.load(tmp_path, "forest").predict(asked), forest.predict(asked))


@pytest.mark.parametrize(
    ("folder", "name"), SHIPPED, ids=lambda part: getattr(part, "parent", part) and str(part)[-20:]
)
def test_a_row_of_a_model_that_comes_along_does_not_depend_on_its_neighbours(folder, name):
    trees = Trees.load(folder, name)
    table = table_of(int(trees.feature.max()) + 1, rows=50)
    assert np.array_equal(trees.predict(table), np.concatenate([trees.predict(row[None]) for row in table]))


def stored(tmp_path, **changed):
    Trees.of_lightgbm([booster_of()]).save(tmp_path, "t")
    with np.load(tmp_path / "t.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    kept |= {name: change(kept[name]) for name, change in changed.items()}
    np.savez_compressed(tmp_path / "t.npz", **{name: array for name, array in kept.items() if array is not None})


def with_first(value):
    def change(array):
        array = array.copy()
        array[0] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("children", with_first(10**6), "do not exist"),
        ("children", with_first(-1), "do not exist"),
        ("children", lambda array: np.where(array == np.arange(len(array))[:, None], len(array) - 1, array), "no end"),
        ("children", lambda array: array[:, 0], "shapes"),
        ("root", with_first(10**6), "do not exist"),
        ("root", lambda array: array[:0], "do not exist"),
        ("root", lambda array: np.append(array[1:], array[1]), "two trees"),
        ("first", with_first(3), "no tree"),
        ("feature", with_first(-1), "do not exist"),
        ("feature", lambda array: array.astype(float), "type float64"),
        ("threshold", with_first(np.nan), "not a number"),
        ("value", with_first(np.inf), "not a number"),
        ("value", lambda array: array[:-1], "shapes"),
        ("start", lambda array: None, "instead of"),
    ],
)
def test_arrays_that_make_no_trees_are_refused(tmp_path, name, change, message):
    stored(tmp_path, **{name: change})
    with pytest.raises(ValueError, match=message):
        Trees.load(tmp_path, "t")


def test_a_table_with_too_few_columns_is_refused(tmp_path):
    with pytest.raises(ValueError, match="columns"):
        Trees.of_lightgbm([booster_of()]).predict(np.zeros((1, 1)))


def test_forests_that_read_one_table_are_followed_together():
    forests = [Trees.of_lightgbm([booster_of(seed)]) for seed in (1, 2, 3)]
    table = table_of(6, rows=70)
    table[:, 2], table[:, 4] = 7.0, np.nan  # columns that tell no row from another
    for rows in (table[:1], table):
        sums = Trees.join(forests).members(rows)
        assert all(np.array_equal(one.predict(rows), alone) for one, alone in zip(forests, sums, strict=True))


@pytest.fixture(scope="module")
def rows():
    configs = make_configs(80)
    return make_rows("memory", configs, labels_of(configs)["peak_memory_mib"])


@pytest.fixture(scope="module")
def fitted(rows):
    return make_estimator("forest", seed=1).fit(rows)


def test_two_families_in_one_table_are_told_apart_by_what_each_lacks(fitted, rows):
    error = np.abs(fitted.predict(rows.cases).point / rows.label - 1)
    assert np.isnan(fitted.table.matrix(rows.cases)).any()
    assert np.median(error) < 0.1


@pytest.mark.parametrize("name", ["forest", "lightgbm"])
def test_a_module_is_refused_and_the_others_are_answered(name, rows):
    job = of_module(lambda: nn.Linear(8, 2), [((4, 8), None)])
    answer = make_estimator(name).fit(rows).predict([rows.cases[0], Case(device=DEVICE, module=job)])
    assert list(answer.refusals) == [1] and "module" in answer.refusals[1]
    assert np.isfinite(answer.point[0]) and np.isnan(answer.point[1])
