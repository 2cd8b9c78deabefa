"""Names of families for tests over all of them.

Start reading at `FAMILIES`.
"""

from __future__ import annotations

import pytest

from featurize.families import family_names

# Networks of libraries: a case takes seconds where others take milliseconds. Golden traces and features, and the plans
# of tests/featurize/test_families.py, hold them in every run of the tests.
_OF_LIBRARIES = ("timm", "zoo")
FAMILIES = tuple(
    pytest.param(name, marks=pytest.mark.slow) if name in _OF_LIBRARIES else pytest.param(name)
    for name in family_names()
)
