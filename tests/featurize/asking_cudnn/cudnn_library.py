"""Whether the extra `cudnn` is installed, for tests that ask the real library. Start reading at `needs_cudnn`."""

import pytest

from conf.errors import EnvironmentProblem
from featurize.cudnn.libraries import installed_libraries


def why_missing():
    try:
        installed_libraries()
    except EnvironmentProblem as error:
        return str(error)
    return ""


needs_cudnn = pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "installed")
