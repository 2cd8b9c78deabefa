"""Estimators over the table of scalar features: what they read, and what they refuse."""

import json

import numpy as np
import pytest
from learn_rows import DEVICE, labels_of, make_configs

from learn.estimators.protocol import make_estimator
from learn.job.training_job import Case
from tests.learn.learn_rows import make_rows


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


def test_device_features_are_among_the_columns(fitted, tmp_path):
    fitted.save(tmp_path)
    columns = json.loads((tmp_path / "estimator.json").read_text())["features"]["columns"]
    assert any(name.startswith("gpu_") for name in columns) and "batch_size" in columns


@pytest.mark.parametrize("name", ["forest", "lightgbm"])
def test_a_module_is_refused_and_the_others_are_answered(name, rows):
    from torch import nn

    from learn.job.training_job import of_module

    job = of_module(lambda: nn.Linear(8, 2), [((4, 8), None)])
    answer = make_estimator(name).fit(rows).predict([rows.cases[0], Case(device=DEVICE, module=job)])
    assert list(answer.refusals) == [1] and "module" in answer.refusals[1]
    assert np.isfinite(answer.point[0]) and np.isnan(answer.point[1])
