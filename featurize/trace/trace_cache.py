"""Traces of steps that were traced before: in this process, and on disk for all processes of this user.

Start reading at `traced`. A job without a key is one that no text tells: its traces live as long as whoever keeps them.
A stale trace is worse than a slow one, so that a key holds all that a trace follows from, and what cannot be told has
none: `config_key` for trial configs, `learn.job.traced` for modules.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from conf.files.disk_cache import keep, recall
from conf.files.identity import canonical_json
from featurize.configs.own_code import code_fields, data_refusal
from featurize.device.device_spec import DeviceSpec

if TYPE_CHECKING:
    from featurize.device.architecture import AttentionKernels
    from featurize.job.trial_config import TrialConfig
    from featurize.recording.step_trace import StepTrace

    # One job's traces, by the GPU's attention kernels and by training loop: all that a trace depends on besides the
    # job.
    Traces: TypeAlias = dict[tuple[AttentionKernels, bool], StepTrace]

MOST_EVENTS = 500_000  # of all traces in memory: some 150 MB
_jobs: OrderedDict[str, Traces] = OrderedDict()  # the one asked for last comes last


def config_key(config: TrialConfig, parallel: object = None) -> str | None:
    """Return the text that tells a trial config's step from all others; None where it names somebody's own code, which
    may change."""
    state = torch_state()
    if state is None or (code_fields(config.family) and data_refusal(config) is not None):
        return None
    return f"{canonical_json(config.to_mapping())} {parallel!r} {state}"


def torch_state() -> str | None:
    """Return what this process has set in torch and timm that a trace may follow; None with hooks of all modules, whose
    code no text tells."""
    import torch
    from torch.nn.modules import module

    if module._has_any_global_hook():
        return None
    of_timm = sys.modules.get("timm.layers.config")
    fused = os.environ.get("TIMM_FUSED_ATTN", 1) if of_timm is None else of_timm._USE_FUSED_ATTN
    cuda = torch.backends.cuda
    sdp = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    flags = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )
    return f"{torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {sdp} {flags} {fused}"


def traced(
    key: str | None, spec: DeviceSpec, training_loop: bool, trace: Callable[[], StepTrace], kept: Traces | None = None
) -> StepTrace:
    """Return a job's trace: from memory, from disk, or as `trace` makes it now.

    Args:
        key: Of the job; None: only `kept` is asked.
        spec: The GPU model. Models whose attention kernels are alike for the job share a trace.
        training_loop: As in `featurize.trace.tracer.trace_step`.
        trace: Traces the job.
        kept: Traces of the job that the caller has at hand, and keeps.
    """
    kind = (spec.architecture.attention, training_loop)
    traces: Traces = {} if key is None else _jobs.setdefault(key, {})
    if key is not None:
        _jobs.move_to_end(key)
    kept = {} if kept is None else kept
    known = _serving(kind, kept) or _serving(kind, traces)
    if known is None and key is not None:
        known = _from_disk(key, kind, traces)
    if known is None:
        known = trace()
        made = {kind: known}
        if known.in_a_loop is not None:
            made[kind[0], True] = known.in_a_loop
        traces |= made
        kept |= made
        if key is not None:
            _to_disk(key, made)
            _forget_oldest()
    kept.setdefault(kind, known)
    return known


def clear() -> None:
    """Forget all traces in memory."""
    _jobs.clear()


def _forget_oldest() -> None:
    events = sum(len(trace.events) for traces in _jobs.values() for trace in traces.values())
    while events > MOST_EVENTS and len(_jobs) > 1:
        _, oldest = _jobs.popitem(last=False)
        events -= sum(len(trace.events) for trace in oldest.values())


def _serving(kind: tuple[AttentionKernels, bool], traces: Traces) -> StepTrace | None:
    """Return a trace of the same loop in which these kernels of attention differ nowhere; None if there is none."""
    if kind in traces:
        return traces[kind]
    for (kernels, loop), trace in traces.items():
        if loop == kind[1] and _are_alike(trace, kernels, kind[0]):
            return trace
    return None


def _are_alike(trace: StepTrace, one: AttentionKernels, other: AttentionKernels) -> bool:
    """Return whether both take the same of the trace's heads. Flash attention computes in half precision only."""
    widest = trace.widest_head
    if widest is None:
        return False
    halves = any(op.dtype in ("float16", "bfloat16") for op in trace.operators)
    flash = not halves or min(one.flash, widest) == min(other.flash, widest)
    return flash and min(one.efficient, widest) == min(other.efficient, widest)


def _from_disk(key: str, kind: tuple[AttentionKernels, bool], traces: Traces) -> StepTrace | None:
    """Return the job's trace on disk where it serves this kind; it is then in memory, too."""
    from featurize.device.architecture import AttentionKernels
    from featurize.trace.stored_trace import trace_of_json

    try:
        stored = recall(f"trace {kind[1]} {key}") or {}
        traces[AttentionKernels(**stored["kernels"]), kind[1]] = trace_of_json(stored["trace"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return _serving(kind, traces)


def _to_disk(key: str, made: Traces) -> None:
    from featurize.trace.stored_trace import trace_to_json

    if all(trace.pipeline is None and trace.mix is None for trace in made.values()):
        keep(
            {
                f"trace {loop} {key}": {"kernels": kernels._asdict(), "trace": trace_to_json(trace)}
                for (kernels, loop), trace in made.items()
            }
        )
