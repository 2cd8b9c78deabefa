"""Fits of these tests grow fewer trees than a user's: what they show does not hang on more, and takes half the time."""

import dataclasses

import pytest

from learn.estimators import hybrid, tabular


@pytest.fixture(autouse=True, scope="module")
def few_trees():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tabular.LightGBMEstimator, "rounds", 100)
        patch.setattr(hybrid, "_OTHERS", dataclasses.replace(hybrid._OTHERS, rounds=120))
        yield
