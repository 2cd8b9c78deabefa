"""Which modes of a job on several GPUs the installed torch is too old for.

Start reading at `refused_modes`. Traces of these modes replace private parts of PyTorch's wrappers, which older
releases do not have. DistributedDataParallel and ZeRO are traced under every release.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from conf.errors import EnvironmentProblem
from featurize.job.layout import EXPERTS, OWN, Parallel
from featurize.operators.torch_releases import installed_release, is_older_than, require_torch

SHARDS = "2.11"  # FSDP2's all-gather is an object, DTensor's cache can be cleared, attention over ranks is a package
_OTHER_STAGES = "2.15"  # from which on stages make and drop their buffers as they go: traces fall short of real ranks
_OLDEST = {"pp": "2.13", "fsdp": SHARDS, "cp": SHARDS, "tp": SHARDS, EXPERTS: SHARDS, OWN: SHARDS}


@functools.cache
def refused_modes() -> Mapping[str, str]:
    """Return each mode that is not traced under the installed release, and why, in words."""
    refused = {}
    for mode, oldest in _OLDEST.items():
        try:
            require_torch(oldest, f"parallel: {mode}")
        except EnvironmentProblem as error:
            refused[mode] = str(error)
    if not is_older_than(_OTHER_STAGES):
        refused["pp"] = f"parallel: pp is not traced under torch {_OTHER_STAGES} or newer yet; use 2.13"
    return refused


def refused_note(modes: Iterable[str]) -> str | None:
    """Return one line on those of the modes that the installed release does not trace; None where it traces all."""
    of_release: dict[str, list[str]] = {}
    for mode in modes:
        if mode in refused_modes():
            of_release.setdefault(_OLDEST["pp"] if mode == "pp" else f"{SHARDS} or newer", []).append(mode)
    if not of_release:
        return None
    texts = [f"{', '.join(names)} ({release})" for release, names in of_release.items()]
    return f"torch {installed_release()} does not trace {' and '.join(texts)}"


def require_traceable(layout: Parallel) -> None:
    """Raise `EnvironmentProblem` for a layout with a mode that is not traced under the installed release."""
    for mode, why in refused_modes().items():
        if getattr(layout, mode) > 1:
            raise EnvironmentProblem(why)
