"""Runs a few training steps under torch.profiler and reports their kernels, after the trial's labels.

Start reading at `report_kernels`; `kernels_of_trace` turns the profiler's trace into rows of `kernels`. On a GPU each
row describes a kernel by CUPTI, on the CPU an operator.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from workers.devices import Link

_BUDGET_MS = 10_000.0  # longest time of all profiled steps; the worker waits half a minute after the labels
_ROWS_A_REPORT = 100
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace
_TYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "int": "int32",
    "long int": "int64",
    "long": "int64",
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
}
_NO_TENSORS = ("", "Scalar", "ScalarList")
_ARGUMENTS = (
    "stride",
    "padding",
    "dilation",
    "groups",
    "output_padding",
    "transposed",
    "dim",
    "is_causal",
    "reduction",
)
_OPTIMIZER, _BACKWARD = "Optimizer.", "autograd::engine"  # prefixes of the names of spans
_DIMS_CHARACTERS = 3_000  # the worker refuses longer ones
_SHOWN = 300  # characters of an error

Event = Mapping[str, Any]


def report_kernels(train_step: Callable[[], None], steps: int, step_time_ms: float, device: str, link: Link) -> None:
    """Profile up to `steps` training steps and report `kernels`, then `profiled`; never raises for a failure.

    Args:
        train_step: Runs one step and waits for the device.
        steps: Steps to profile; fewer if they would take more than ten seconds.
        step_time_ms: Measured time of a step, in ms.
        device: Type of the torch device, such as cuda.
        link: The connection to the worker.
    """
    steps = min(steps, int(_BUDGET_MS / max(step_time_ms, 1e-3)))
    problem, rows = None, []
    if steps < 1:
        problem = f"a step takes {step_time_ms / 1e3:.1f} s, too long for the profiler"
    else:
        try:
            rows = kernels_of_trace(profiled_trace(train_step, steps, device), steps)
        except Exception as error:  # the run is measured even if the profiler's libraries fail
            problem = f"{type(error).__name__}: {error}"[:_SHOWN]
        if problem is None and not rows:
            problem = "the profiler saw no kernel; CUPTI may be in use or not permitted"
    report_rows(rows, problem, link)


def report_rows(rows: list[dict[str, Any]], problem: str | None, link: Link) -> None:
    """Report rows of `kernels` in parts, then `profiled`."""
    for start in range(0, len(rows), _ROWS_A_REPORT):
        link.report("kernels", rows=rows[start : start + _ROWS_A_REPORT])
    link.report("profiled", problem=problem)


def profiled_trace(train_step: Callable[[], None], steps: int, device: str) -> list[Event]:
    """Run `steps` steps under torch.profiler, after one for its warm-up; return the events of its trace."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities):
        train_step()
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            train_step()
    descriptor, path = tempfile.mkstemp(suffix=".json")  # only the exported trace has grid, block and registers
    os.close(descriptor)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events: list[Event] = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    return events


def kernels_of_trace(events: Iterable[Event], steps: int) -> list[dict[str, Any]]:
    """Return rows of `kernels`: one per kernel, operator and shapes, with the median duration and the count.

    A kernel belongs to the operator that PyTorch dispatches: `aten::convolution`, not the outer `aten::conv2d` or the
    inner `aten::cudnn_convolution`. A CPU's trace has no kernels; its rows describe operators.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    calls = list(_calls([event for event in complete if event.get("cat") in ("cpu_op", "user_annotation")]))
    on_device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    durations: dict[Hashable, list[float]] = defaultdict(list)
    rows: dict[Hashable, dict[str, Any]] = {}

    def add(row: dict[str, Any], duration_us: float) -> None:
        key = tuple(row.values())
        rows.setdefault(key, row)
        durations[key].append(duration_us)

    if on_device:
        by_id = {call["args"].get("External id"): (operator, phase) for call, operator, phase in calls}
        for event in on_device:
            operator, phase = by_id.get(event["args"].get("External id"), (None, None))
            add(_kernel(event, operator, phase), float(event["dur"]))
    else:
        for call, operator, phase in calls:
            if operator is call and _is_operator(call["name"]):
                add({**_operator(call, phase), "timing": "cpu"}, float(call["dur"]))
    return [
        {**row, "duration_us": statistics.median(durations[key]), "count": len(durations[key]), "steps": steps}
        for key, row in rows.items()
        if statistics.median(durations[key]) > 0
    ]


def _calls(spans: list[Event]) -> Iterator[tuple[Event, Event | None, str]]:
    """Yield each call of an operator, its dispatched operator, and its phase.

    Calls of a thread are nested: a call that begins before another's end is inside it.
    """
    threads: dict[Hashable, list[Event]] = defaultdict(list)
    for span in spans:
        threads[span.get("pid"), span.get("tid")].append(span)
    for thread in threads.values():
        # If two begin together, the longer one is outside.
        thread.sort(key=lambda span: (span["ts"], -span["dur"], span["args"].get("Ev Idx", 0)))
        outer: list[Event] = []
        for span in thread:
            while outer and span["ts"] >= outer[-1]["ts"] + outer[-1]["dur"]:
                outer.pop()
            outer.append(span)
            if span.get("cat") == "cpu_op":
                yield span, _find_dispatched(outer), _phase(outer)


def _find_dispatched(outer: Sequence[Event]) -> Event | None:
    """Return the outermost of nested calls that PyTorch's dispatcher runs as one operator; None without any."""
    for call in outer:
        if call["name"].startswith("aten::") and not _is_composite(call["name"]):
            return call
    operators = [call for call in outer if call.get("cat") == "cpu_op" and not call["name"].startswith(_BACKWARD)]
    return operators[-1] if operators and not operators[-1]["name"].startswith("aten::") else None


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith((_BACKWARD, "torch::autograd"))


@functools.cache
def _is_composite(name: str) -> bool:
    """Return whether every overload of an operator is decomposed before dispatch, like aten::linear."""
    import torch

    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        return False
    names = [name if overload == "default" else f"{name}.{overload}" for overload in packet.overloads()]
    # An `out` variant is never composite, and no model calls it; some overloads exist in TorchScript only.
    known = [overload for overload in names if not overload.endswith("out") and torch._C._dispatch_has_kernel(overload)]
    return bool(known) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd") for overload in known
    )


def _phase(outer: Sequence[Event]) -> str:
    if any(span["name"].startswith(_OPTIMIZER) for span in outer):
        return "optimizer"
    return "backward" if any(span["name"].startswith(_BACKWARD) for span in outer) else "forward"


def _operator(call: Event, phase: str | None) -> dict[str, Any]:
    arguments = call["args"]
    types = [name for name in arguments.get("Input type", ()) if name not in _NO_TENSORS]
    return {
        "phase": phase,
        "operator": call["name"],
        "dims": dims_text(arguments.get("Input Dims", []), _named_arguments(call)),
        "dtype": _TYPES.get(types[0], types[0]) if types else None,
    }


def dims_text(shapes: Sequence[Any], arguments: Mapping[str, Any] | None = None) -> str:
    """Return the column `dims`; for an operator on very many tensors, the numbers of tensors and elements."""
    dims: dict[str, Any] = {"shapes": shapes, **({"arguments": arguments} if arguments else {})}
    text = json.dumps(dims, sort_keys=True, separators=(",", ":"))
    if len(text) <= _DIMS_CHARACTERS:
        return text
    tensors = list(_flat(shapes))
    return json.dumps({"elements": sum(map(math.prod, tensors)), "tensors": len(tensors)}, separators=(",", ":"))


def _flat(shapes: Sequence[Any]) -> Iterator[Sequence[int]]:
    """Yield the shapes of tensors in nested lists of shapes."""
    for shape in shapes:
        if any(isinstance(size, list | tuple) for size in shape):
            yield from _flat(shape)
        elif shape:
            yield shape


def _named_arguments(call: Event) -> dict[str, Any]:
    """Return the known arguments that decide what is computed, such as the stride."""
    values = call["args"].get("Concrete Inputs", ())
    named = {}
    for name, text in zip(_argument_names(call["name"]), values, strict=False):
        if name in _ARGUMENTS and text:
            try:
                named[name] = json.loads(text.lower() if text in ("True", "False") else text)
            except ValueError:
                continue
    return named


@functools.cache
def _argument_names(name: str) -> tuple[str, ...]:
    import torch

    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None) if name.startswith("aten::") else None
    if packet is None or "default" not in packet.overloads():
        return ()
    return tuple(argument.name for argument in packet.default._schema.arguments)


def _kernel(event: Event, operator: Event | None, phase: str | None) -> dict[str, Any]:
    arguments = event["args"]
    row: dict[str, Any] = {"phase": phase, "operator": "unknown", "dims": None, "dtype": None}
    if operator is not None:
        row = _operator(operator, phase)
    row["kernel"] = event["name"]
    for kind in ("grid", "block"):
        extent = arguments.get(kind) or [None] * 3
        row |= {f"{kind}_{axis}": size for axis, size in zip("xyz", extent, strict=True)}
    figures = {
        "blocks_per_sm": "blocks per SM",
        "warps_per_sm": "warps per SM",
        "registers_per_thread": "registers per thread",
        "shared_memory_bytes": "shared memory",
        "stream": "stream",
    }
    return {**row, **{column: arguments.get(name) for column, name in figures.items()}, "timing": "cupti"}
