"""Features move only with their version: golden values, artifacts of hashes, and source text that changes nothing."""

import golden_features
import pytest
from golden_features import differences, golden, same_libraries

from featurize.configs.features import FEATURES_VERSION, HISTORY
from featurize.families import family_names

STORED = golden()
CASES = STORED["cases"]


def test_the_golden_values_are_of_todays_version():
    assert STORED["version"] == FEATURES_VERSION, golden_features.HOW
    assert set(HISTORY) == set(range(1, FEATURES_VERSION + 1)) and all(HISTORY.values())


def require_golden(name, *, traced):
    lines = list(differences(name, CASES[name], traced=traced))
    assert not lines, "\n".join([*lines, golden_features.HOW])


@pytest.mark.parametrize("name", CASES)
def test_no_feature_of_a_config_moves_while_the_version_stays(name):
    require_golden(name, traced=False)


@pytest.mark.spread(2)
@pytest.mark.skipif(not same_libraries(STORED), reason="the golden steps are of other releases of torch and timm")
@pytest.mark.parametrize("name", CASES)
def test_no_feature_of_a_traced_step_moves_while_the_version_stays(name):
    require_golden(name, traced=True)


def test_every_family_has_a_golden_case_and_modules_have_some():
    assert {case["config"]["family"] for case in CASES.values() if "config" in case} == set(family_names())
    assert {name for name, case in CASES.items() if "config" not in case} == set(golden_features.MODULES)
