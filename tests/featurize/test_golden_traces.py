"""The golden steps under the torch that is installed; `make test-torch` traces the same steps under other releases."""

import re
from pathlib import Path

import pytest
from golden_traces import expected, figures_of, golden, installed_release

from featurize.families import family_names

ROOT = Path(__file__).resolve().parents[2]
CASES = golden()["cases"]


@pytest.mark.spread(3)  # golden features of every family are of such steps, too
@pytest.mark.parametrize("name", CASES)
def test_a_golden_step_takes_what_it_took_under_every_tested_release(name):
    assert figures_of(CASES[name]["config"]) == expected(CASES[name], installed_release())


def test_every_family_has_a_golden_step_and_there_is_a_convolution():
    families = {case["config"]["family"] for case in CASES.values()}
    # Models of timm are another library's; `zoo` has cases of torch's own modules.
    assert set(family_names()) == families | {"timm"}
    assert any("Conv" in case["config"].get("model", "") for case in CASES.values())


def test_the_tested_releases_are_those_that_the_project_declares():
    tested = golden()["tested"]
    assert tested == sorted(tested, key=lambda text: [int(part) for part in text.split(".")]) and len(tested) >= 3
    assert f'"torch>={tested[0]}"' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"^TORCH +\?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert pinned in tested
    for name in ("docs/install.md", "docs/comparing.md"):
        text = (ROOT / name).read_text()
        assert all(version in text for version in tested), name
