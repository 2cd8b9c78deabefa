"""Estimates from trial configs alone, by the fast path that comes with the project.

Start reading at `fast_estimates`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from conf.errors import EnvironmentProblem, UsageError
from featurize.device_spec import DeviceSpec, plain_device
from featurize.machine import DESCRIBED, MachineProfile, machine
from featurize.trial import FITTED_OPTIMIZERS, MATH_BITS, OPTIMIZERS, TrialConfig
from featurize.version import is_current
from learn.artifacts import DEFAULT_MODELS, default_artifact
from learn.estimation.job_estimate import Estimate
from learn.estimation.loops import PIPELINE, RESIDENT
from learn.estimation.notes import MAY_RUN_OUT, OUT_OF_MEMORY, PROBLEM, WARNING, Note
from learn.fastpath.fast import FastPath
from learn.fastpath.fast_replay import WITH_CUDNN
from learn.learned.familiarity import Familiarity
from learn.targets import get_target

NAME = "fast (default)"
# Target -> loop, as `learn.build_defaults` teaches it: the fitted models' figures, and the trace's.
FAST_LOOPS = {"memory": PIPELINE, "smact": PIPELINE, "smocc": PIPELINE, "drama": RESIDENT, "step_time": RESIDENT}
STALE = "the fast path was distilled from traces of other code than this: it may be a little off"


def fast_estimates(configs: Sequence[TrialConfig], device: DeviceSpec, on: MachineProfile) -> list[Estimate]:
    """One estimate a config, in order, without tracing: no breakdown, and `seconds` is each one's share of the time.

    Raises `UsageError` for a family that the fast path does not know and for a config on several GPUs,
    `EnvironmentProblem` where there is none.
    """
    began = time.perf_counter_ns()
    if several := next((config.parallel for config in configs if config.parallel is not None), None):
        raise UsageError(f"method=fast knows one GPU, and a config has parallel={several}; use method=full")
    path = _loaded(DEFAULT_MODELS / "fast")
    outlook = path.answer(configs, device)
    columns = {get_target(name).column: figures.tolist() for name, figures in outlook.figures.items()}
    unknown = [None] * len(configs)
    upper = unknown if outlook.upper_mib is None else outlook.upper_mib.tolist()
    by = dict.fromkeys(path.targets, NAME)
    errors = {
        family: {target: {name: error[name] for name in ("median", "p90")} for target, error in of_family.items()}
        for family, of_family in path.errors.items()
    }
    loops = {target: FAST_LOOPS[target] for target in by}
    stale = () if is_current(path.teacher) else (Note("stale-model", WARNING, STALE),)
    moved = [_moved_mib(config, device, on) for config in configs]
    memory = [mib + more for mib, more in zip(columns["peak_memory_mib"], moved, strict=True)]
    upper = [None if mib is None else mib + more for mib, more in zip(upper, moved, strict=True)]
    seconds = (time.perf_counter_ns() - began) / 1e9 / max(len(configs), 1)
    return [
        Estimate(
            peak_memory_mib=memory[i],
            upper_mib=upper[i],
            least_card_mib=upper[i],
            smact=columns.get("smact", unknown)[i],
            smocc=columns.get("smocc", unknown)[i],
            drama=columns.get("drama", unknown)[i],
            step_time_ms=columns.get("step_time_ms", unknown)[i],
            parameters=None,
            breakdown={},
            peak_operator=None,
            peak_module=None,
            peak_phase=None,
            activations={},
            trace_memory_mib=None,
            device=device.name,
            device_memory_mib=device.memory_mib,
            notes=(*_notes(memory[i], upper[i], outlook.unlike[i], device), *_of_teacher(config, device), *stale),
            estimator="fast",
            answered_by=by,
            loops=loops,
            machine=on.name,
            seconds=seconds,
            held_out_errors=errors[config.family],
        )
        for i, config in enumerate(configs)
    ]


def fast_problem(config: TrialConfig, device: DeviceSpec) -> str | None:
    """Return why the fast path does not answer for a config on a GPU model, or None."""
    path = _loaded(DEFAULT_MODELS / "fast")
    if config.family not in path.families:
        return f"method fast knows the families {', '.join(sorted(path.families))}, not {config.family}"
    if config.parallel is not None:
        return f"method fast knows one GPU, and the config has parallel={config.parallel}"
    if config.optimizer not in FITTED_OPTIMIZERS:
        return f"method fast knows the optimizers {', '.join(FITTED_OPTIMIZERS)}, not {config.optimizer}"
    if not path.answers_for(device):
        return f"method fast was distilled on NVIDIA GPUs, and {device.name} is none"
    return None


def _moved_mib(config: TrialConfig, device: DeviceSpec, on: MachineProfile) -> float:
    """Return what the card holds more on this machine than on the one that the fast path was distilled for."""
    loads_cudnn = config.family in WITH_CUDNN
    described = machine(DESCRIBED, device)
    return on.outside_mib(loads_cudnn) + on.other_mib - described.outside_mib(loads_cudnn)


def _notes(mib: float, upper: float | None, unlike: Sequence[str], device: DeviceSpec) -> list[Note]:
    notes = [
        Note("unlike-distilled", WARNING, f"unlike what the fast path was distilled on: {reason}") for reason in unlike
    ]
    if mib > device.memory_mib:
        notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: {device.name} has {device.memory_mib:,.0f} MiB"))
    elif upper is not None and upper > device.memory_mib:
        text = f"it may run out of memory: the bound is above the {device.memory_mib:,.0f} MiB of {device.name}"
        notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
    return notes


def _of_teacher(config: TrialConfig, device: DeviceSpec) -> list[Note]:
    """Why the teacher of memory, too, is unlike what was measured, as far as a config tells."""
    known = _familiarity()
    if known is None:
        return []
    reasons = known.settings_said(
        {
            "net_math_bits": MATH_BITS[config.precision],
            "net_states": OPTIMIZERS[config.optimizer].states,
            "net_channels_last": float(config.channels_last),
            "net_cudnn_benchmark": float(config.cudnn_benchmark),
        }
    )
    if plain_device(device.name) not in known.devices:
        reasons.append(known.device_said(device.name))
    return [Note("unlike-fitted", WARNING, f"unlike what was measured: {reason}") for reason in reasons]


@lru_cache(maxsize=1)
def _familiarity() -> Familiarity | None:
    artifact = default_artifact("memory")
    if artifact is None:
        return None
    state = json.loads((artifact.path / "model" / "estimator.json").read_text())
    return Familiarity.from_mapping(state["familiarity"])


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> FastPath:
    if not (folder / "fast.json").is_file():
        raise EnvironmentProblem("there is no fast path here: python -m learn.build_defaults path=FOLDER makes it")
    return FastPath.load(folder)
