"""Compares a recorded allocator history with our trace of the same job, block by block, and finds the cause of gaps.

Start reading at `compare_blocks`. `workers.probes.histories` records the histories on a GPU. `featurize.memory.replay`
replays one through the allocator simulator, and records the history of a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from conf.errors import UsageError, shown
from conf.plain_text import counted
from conf.units import MIB
from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import known_device, load_device
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.memory.replay import GIVEN_BACK, TAKEN, MemoryProfile, replay, replay_history
from featurize.recording.step_trace import StepTrace
from workers.probes.children import Measured

HISTORY_KEYS = (
    "name",
    "config",
    "conf",
    "torch_version",
    "device_name",
    "total_bytes",
    "trace",
    "marks",
    "segments",
    "peak_reserved",
    "peak_allocated",
    "ooms",
)
ALLOCATOR, REQUESTS, WORKSPACES, ORDER, NONE = "allocator", "requests", "workspaces", "order", "none"
CAUSES = (ALLOCATOR, REQUESTS, WORKSPACES, ORDER)
_CLOSE_BYTES, _CLOSE_SHARE = 2 * MIB, 0.01  # a small segment, and the usual scatter of a step's reserved memory


@dataclass(frozen=True, kw_only=True)
class BlocksApart:
    """Blocks of the same size and origin that only one side has.

    Args:
        nbytes: Size of each block, rounded like the allocator's.
        count: Surplus of this side over the other.
        where: Traced: kind, operator and module. Recorded: phase and module, empty if the release has no labels.
        is_workspace: Whether they are, or may be, workspaces.
    """

    nbytes: int
    count: int
    where: str
    is_workspace: bool

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.count


@dataclass(frozen=True, kw_only=True)
class BlockMatch:
    """Blocks of both sides, matched by rounded size, and those of one side only, the most bytes first."""

    matched_count: int
    matched_bytes: int
    only_measured: tuple[BlocksApart, ...]
    only_traced: tuple[BlocksApart, ...]


Curve: TypeAlias = list[tuple[int, int]]  # bytes allocated and reserved after each request and release of a step


@dataclass(frozen=True, kw_only=True)
class BlockComparison:
    """Result of `compare_blocks`. Allocated bytes are sums of rounded blocks.

    Args:
        name: Name of the history.
        measured_allocated_bytes: Most bytes that were allocated, from the recorded requests.
        measured_reserved_bytes: Most bytes that PyTorch reserved.
        replayed_reserved_bytes: Most bytes that our allocator reserves for the recorded requests.
        traced_allocated_bytes: Most bytes that our trace allocates.
        traced_reserved_bytes: Most bytes that our allocator reserves for our trace.
        at_peak: Blocks alive at the moments of the most allocated bytes.
        in_step: Blocks requested in the last step.
        measured_curve: Curve of the last recorded step; reserved as recorded. The curves differ in number of points.
        traced_curve: Curve of the last traced step.
        gap_bytes: Cause, one of `CAUSES` -> bytes by which it makes the measured reserved peak exceed the traced one,
            or negative. `order` is the remainder, including differences in segment sizes.
        verdict: The main cause, or `none` if the two peaks are equal within 2 MiB or 1 %.
        allocator_difference: Text on the first segment that our allocator takes or frees differently for the recorded
            requests; None without a difference.
        cut_off: Why the recording ended before its last step; None if it is complete.
    """

    name: str
    measured_allocated_bytes: int
    measured_reserved_bytes: int
    replayed_reserved_bytes: int
    traced_allocated_bytes: int
    traced_reserved_bytes: int
    at_peak: BlockMatch
    in_step: BlockMatch
    measured_curve: Curve
    traced_curve: Curve
    gap_bytes: Mapping[str, int]
    verdict: str
    allocator_difference: str | None
    cut_off: str | None


class _Held(NamedTuple):
    """A block: its rounded size, and the numbers of the events that took it and freed it (None: never freed).

    A recording does not name workspaces: a block that is freed before the next request counts as one.
    """

    nbytes: int
    begin: int
    end: int | None
    where: str
    is_workspace: bool


class _Side(NamedTuple):
    """One side's blocks, the state after each event as (event, allocated, reserved), and its last step's events."""

    blocks: list[_Held]
    moments: list[tuple[int, int, int]]
    step: range


def history_of(measured: Measured) -> dict[str, Any]:
    """Return the history that a measurement recorded. Raises `UsageError` without one."""
    if not measured.rows:
        raise UsageError(measured.reason or "its process gave no history")
    history = {**measured.rows[-1], "name": measured.name, "cut_off": measured.cut_off}
    if missing := [key for key in HISTORY_KEYS if key not in history]:
        raise UsageError(f"history {measured.name} is incomplete: missing {', '.join(missing)}")
    return history


def compare_blocks(history: Mapping[str, Any]) -> BlockComparison:
    """Compare a recorded history with our trace of the same config for the same GPU.

    Args:
        history: Has `HISTORY_KEYS`. `marks` are indices into `trace`: the begin of each step, and the end of the last.

    Raises:
        UsageError: No device description matches the GPU, or the history is incomplete or inconsistent.
        TraceError: The config cannot be traced.
    """
    from featurize.trace.tracer import trace_config

    known = known_device(str(history["device_name"]))
    if known is None:
        raise UsageError(f"no device description matches the GPU {shown(history['device_name'])}")
    spec = load_device(known)
    config = config_from_mapping(history["config"])
    settings = AllocatorSettings.parse(history["conf"])
    round_up = settings.size_rounding()
    recorded = replay_history(history["trace"], settings, total_bytes=history["total_bytes"])
    if count := recorded.unmatched_frees:
        freed = counted(count, "freed block has", "freed blocks have")
        raise UsageError(f"history {shown(history['name'])} is incomplete: {freed} no recorded request")
    measured = _side(history["trace"], _last_step(history), round_up)
    trace = trace_config(config, device=spec)
    profile = replay(trace, spec, cudnn_benchmark=config.cudnn_benchmark, allocator=settings, timeline=True)
    if not profile.fits:
        raise UsageError(
            f"history {shown(history['name'])} has no counterpart: its traced step does not fit {spec.name}"
        )
    traced = _traced_side(trace, profile, round_up)

    measured_peak, traced_peak = _peak(measured), _peak(traced)
    alive = _alive(measured, measured_peak[0]), _alive(traced, traced_peak[0])
    requested = _list_requested(measured), _list_requested(traced)
    replayed = recorded.allocator.peak_reserved_bytes
    at_peak, in_step = _match(*alive), _match(*requested)
    of_workspaces = _workspace_bytes(at_peak.only_measured) - _workspace_bytes(at_peak.only_traced)
    gap = {
        ALLOCATOR: int(history["peak_reserved"]) - replayed,
        WORKSPACES: of_workspaces,
        REQUESTS: measured_peak[1] - traced_peak[1] - of_workspaces,
        ORDER: (replayed - profile.peak_reserved) - (measured_peak[1] - traced_peak[1]),
    }
    difference = recorded.first_difference()
    verdict = _verdict(gap, difference, int(history["peak_reserved"]), (at_peak, in_step))
    return BlockComparison(
        name=str(history["name"]),
        measured_allocated_bytes=measured_peak[1],
        measured_reserved_bytes=int(history["peak_reserved"]),
        replayed_reserved_bytes=replayed,
        traced_allocated_bytes=traced_peak[1],
        traced_reserved_bytes=profile.peak_reserved,
        at_peak=at_peak,
        in_step=in_step,
        measured_curve=_curve(measured),
        traced_curve=_curve(traced),
        gap_bytes={cause: gap[cause] for cause in CAUSES},
        verdict=verdict,
        allocator_difference=difference,
        cut_off=history.get("cut_off"),
    )


def _last_step(history: Mapping[str, Any]) -> range:
    marks, entries = list(history["marks"]), len(history["trace"])
    if len(marks) < 2 or marks != sorted(marks) or not 0 <= marks[0] <= marks[-1] <= entries:
        raise UsageError(f"history {shown(history['name'])}: marks must rise from 0 to {entries}, got {shown(marks)}")
    return range(marks[-2], marks[-1])


def _side(entries: Sequence[Mapping[str, Any]], step: range, round_up: Callable[[int], int]) -> _Side:
    """Return the side of a recorded history."""
    blocks: list[_Held] = []
    live: dict[int, int] = {}  # address -> number of its block
    moments = []
    allocated = reserved = 0
    for index, entry in enumerate(entries):
        action, size, address = entry["action"], int(entry.get("size", 0)), int(entry.get("addr", 0))
        if action == "alloc":
            live[address] = len(blocks)
            blocks.append(_Held(round_up(size), index, None, str(entry.get("where", "")), False))
            allocated += blocks[-1].nbytes
        elif action == "free_completed" and address in live:
            number = live.pop(address)
            held = blocks[number]
            blocks[number] = held._replace(end=index, is_workspace=number == len(blocks) - 1)
            allocated -= held.nbytes
        elif action in TAKEN:
            reserved += size
        elif action in GIVEN_BACK:
            reserved -= size
        else:
            continue
        moments.append((index, allocated, reserved))
    return _Side(blocks, moments, step)


def _traced_side(trace: StepTrace, profile: MemoryProfile, round_up: Callable[[int], int]) -> _Side:
    """Return the side of a trace, from the history of its replay."""
    assert profile.snapshot is not None, "the replay has a timeline"
    entries = [{**entry, "where": _where(entry)} for entry in profile.snapshot["device_traces"][0]]
    last = f"step {trace.events[-1].step}" if trace.events else ""
    phases = (entry["frames"][-1]["filename"] if entry["frames"] else "" for entry in entries)
    first = next((index for index, phase in enumerate(phases) if phase == last), 0)
    side = _side(entries, range(first, len(entries)), round_up)
    known = [held._replace(is_workspace=entries[held.begin]["category"] == "workspace") for held in side.blocks]
    return side._replace(blocks=known)


def _where(entry: Mapping[str, Any]) -> str:
    """Return the kind, operator (for a workspace the library's call) and module of a traced request."""
    if not entry["frames"]:
        return ""
    made = entry["frames"][0]
    module = "" if made["filename"] == "model" else made["filename"]
    return " ".join(filter(None, dict.fromkeys((entry["category"], entry["user_metadata"] or made["name"], module))))


def _peak(side: _Side) -> tuple[int, int]:
    """Return (the first event after which the most bytes are allocated, these bytes)."""
    index, allocated, _ = max(side.moments, key=lambda moment: moment[1], default=(0, 0, 0))
    return index, allocated


def _alive(side: _Side, index: int) -> list[_Held]:
    return [held for held in side.blocks if held.begin <= index and (held.end is None or held.end > index)]


def _list_requested(side: _Side) -> list[_Held]:
    """Return the blocks that the last step requests. The trace copies its batch once, a trial in every step."""
    return [
        held
        for held in side.blocks
        if held.begin in side.step or (held.where == "batch" and held.begin < side.step.start and held.end is None)
    ]


def _workspace_bytes(apart: Iterable[BlocksApart]) -> int:
    return sum(blocks.total_bytes for blocks in apart if blocks.is_workspace)


def _apart(side: Iterable[_Held], other: Iterable[_Held]) -> tuple[BlocksApart, ...]:
    """Return the blocks without an equally large one on the other side. Of equal blocks, possible workspaces remain."""
    missing = Counter(held.nbytes for held in other)
    counts: Counter[tuple[int, str, bool]] = Counter()
    for held in sorted(side, key=lambda held: held.is_workspace):
        if missing[held.nbytes] > 0:
            missing[held.nbytes] -= 1
        else:
            counts[held.nbytes, held.where, held.is_workspace] += 1
    apart = [
        BlocksApart(nbytes=nbytes, count=count, where=where, is_workspace=is_workspace)
        for (nbytes, where, is_workspace), count in counts.items()
    ]
    return tuple(sorted(apart, key=lambda blocks: -blocks.total_bytes))


def _match(measured: Sequence[_Held], traced: Sequence[_Held]) -> BlockMatch:
    only_measured, only_traced = _apart(measured, traced), _apart(traced, measured)
    return BlockMatch(
        matched_count=len(measured) - sum(blocks.count for blocks in only_measured),
        matched_bytes=sum(held.nbytes for held in measured) - sum(blocks.total_bytes for blocks in only_measured),
        only_measured=only_measured,
        only_traced=only_traced,
    )


def _curve(side: _Side) -> Curve:
    return [(allocated, reserved) for index, allocated, reserved in side.moments if index in side.step]


def _verdict(
    gap: Mapping[str, int],
    difference: str | None,
    measured_reserved: int,
    matches: Sequence[BlockMatch],
) -> str:
    """Return the cause that decides.

    `matches` describe the blocks alive at the peak, then those of the step. Differences in requests are judged before
    differences in order, because requests decide how blocks can be placed.
    """
    if difference is not None or gap[ALLOCATOR]:
        return ALLOCATOR
    close = max(_CLOSE_BYTES, _CLOSE_SHARE * measured_reserved)
    if abs(sum(gap.values())) <= close:
        return NONE
    for match in matches:
        apart = [*match.only_measured, *match.only_traced]
        nbytes = {WORKSPACES: _workspace_bytes(apart)}
        nbytes[REQUESTS] = sum(blocks.total_bytes for blocks in apart) - nbytes[WORKSPACES]
        cause = max(nbytes, key=lambda name: nbytes[name])
        if nbytes[cause] > close:
            return cause
    return ORDER
