"""Compares a recorded allocator history with our trace of the same job, block by block, and finds the cause of gaps.

Start reading at `compare_blocks`. `workers.probes.histories` records the histories on a GPU. `featurize.memory.replay`
replays one through the allocator simulator, and records the history of a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from conf.errors import UsageError, shown
from conf.units import MIB
from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import known_device, load_device
from featurize.memory.allocator import AllocatorSettings
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
_CLOSE_BYTES, _CLOSE_SHARE = 2 * MIB, 0.01  # a small segment, and the usual scatter of a step's reserved memory


class Kind(NamedTuple):
    """Blocks of the same size and origin.

    Args:
        nbytes: Size of each block, rounded like the allocator's.
        where: Traced: kind, operator and module. Recorded: phase and module, empty if the release has no labels.
        is_workspace: Whether they are workspaces. A recording does not name them: a block that is freed before the next
            request counts as one.
    """

    nbytes: int
    where: str
    is_workspace: bool


class Block(NamedTuple):
    """A block: its kind, and the numbers of the events that took it and freed it (None: never freed)."""

    kind: Kind
    begin: int
    end: int | None


@dataclass(frozen=True, kw_only=True)
class BlockMatch:
    """Blocks of both sides, matched by rounded size, and those of one side only: kind -> surplus over the other."""

    matched_count: int
    matched_bytes: int
    only_measured: Counter[Kind]
    only_traced: Counter[Kind]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A recorded or traced history. Allocated bytes are sums of rounded blocks.

    Args:
        blocks: All blocks, in the order of their requests.
        moments: The state after each event: (event, bytes allocated, bytes reserved).
        step: Events of the last step.
        reserved_bytes: Most bytes that PyTorch reserved, or that our allocator reserves for our trace.
    """

    blocks: list[Block]
    moments: list[tuple[int, int, int]]
    step: range
    reserved_bytes: int

    @property
    def curve(self) -> list[tuple[int, int]]:
        """Return the bytes allocated and reserved after each request and release of the last step."""
        return [(allocated, reserved) for index, allocated, reserved in self.moments if index in self.step]

    @cached_property
    def peak(self) -> tuple[int, int]:
        """Return (the first event after which the most bytes are allocated, these bytes)."""
        return max(self.moments, key=lambda moment: moment[1], default=(0, 0, 0))[:2]

    def at_peak(self) -> list[Block]:
        """Return the blocks alive at the peak."""
        peak, _ = self.peak
        return [block for block in self.blocks if block.begin <= peak and (block.end is None or block.end > peak)]

    def in_step(self) -> list[Block]:
        """Return the blocks that the last step requests. The trace copies its batch once, a trial in every step."""
        return [
            block
            for block in self.blocks
            if block.begin in self.step
            or (block.kind.where == "batch" and block.begin < self.step.start and block.end is None)
        ]


@dataclass(frozen=True, kw_only=True)
class BlockComparison:
    """Result of `compare_blocks`.

    Args:
        name: Name of the history.
        measured: The recorded history.
        traced: Our trace of the same job.
        replayed_reserved_bytes: Most bytes that our allocator reserves for the recorded requests.
        at_peak: Blocks alive at the moments of the most allocated bytes.
        in_step: Blocks requested in the last step.
        gap_bytes: Cause -> bytes by which it makes the measured reserved peak exceed the traced one, or negative.
            Causes are `allocator`, `requests`, `workspaces` and the remainder `order`, including differences in segment
            sizes.
        allocator_difference: Text on the first segment that our allocator takes or frees differently for the recorded
            requests; None without a difference.
        cut_off: Why the recording ended before its last step; None if it is complete.
    """

    name: str
    measured: Side
    traced: Side
    replayed_reserved_bytes: int
    at_peak: BlockMatch
    in_step: BlockMatch
    gap_bytes: Mapping[str, int]
    allocator_difference: str | None
    cut_off: str | None

    @cached_property
    def verdict(self) -> str:
        """Return the main cause, or `none` if the two peaks are equal within 2 MiB or 1 %.

        Differences in requests are judged before differences in order, because requests decide how blocks can be
        placed.
        """
        if self.allocator_difference is not None or self.gap_bytes[ALLOCATOR]:
            return ALLOCATOR
        close = max(_CLOSE_BYTES, _CLOSE_SHARE * self.measured.reserved_bytes)
        if abs(sum(self.gap_bytes.values())) <= close:
            return NONE
        for match in (self.at_peak, self.in_step):
            apart = match.only_measured + match.only_traced
            of_workspaces = _workspace_bytes(apart)
            of_requests = _bytes(apart) - of_workspaces
            if max(of_workspaces, of_requests) > close:
                return WORKSPACES if of_workspaces >= of_requests else REQUESTS
        return ORDER


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

    name = str(history["name"])
    known = known_device(str(history["device_name"]))
    if known is None:
        raise UsageError(f"no device description matches the GPU {shown(history['device_name'])}")
    spec = load_device(known)
    config = config_from_mapping(history["config"])
    settings = AllocatorSettings.parse(history["conf"])
    recorded = replay_history(history["trace"], settings, total_bytes=history["total_bytes"])
    if count := recorded.unmatched_frees:
        raise UsageError(f"history {shown(name)} is incomplete: {count} freed without a recorded request")
    marks, entries = list(history["marks"]), len(history["trace"])
    if len(marks) < 2 or marks != sorted(marks) or not 0 <= marks[0] <= marks[-1] <= entries:
        raise UsageError(f"history {shown(name)}: marks must rise from 0 to {entries}, got {shown(marks)}")
    step, round_up = range(marks[-2], marks[-1]), settings.size_rounding()
    measured = _side(history["trace"], step, round_up, int(history["peak_reserved"]))
    trace = trace_config(config, device=spec)
    profile = replay(trace, spec, cudnn_benchmark=config.cudnn_benchmark, allocator=settings, timeline=True)
    if not profile.fits:
        raise UsageError(f"history {shown(name)} has no counterpart: its traced step does not fit {spec.name}")
    traced = _traced_side(trace, profile, round_up)

    replayed = recorded.allocator.peak_reserved_bytes
    at_peak = _match(measured.at_peak(), traced.at_peak())
    of_workspaces = _workspace_bytes(at_peak.only_measured) - _workspace_bytes(at_peak.only_traced)
    more_allocated = measured.peak[1] - traced.peak[1]
    return BlockComparison(
        name=name,
        measured=measured,
        traced=traced,
        replayed_reserved_bytes=replayed,
        at_peak=at_peak,
        in_step=_match(measured.in_step(), traced.in_step()),
        gap_bytes={
            ALLOCATOR: measured.reserved_bytes - replayed,
            REQUESTS: more_allocated - of_workspaces,
            WORKSPACES: of_workspaces,
            ORDER: replayed - traced.reserved_bytes - more_allocated,
        },
        allocator_difference=recorded.first_difference(),
        cut_off=history.get("cut_off"),
    )


def _side(
    entries: Sequence[Mapping[str, Any]], step: range, round_up: Callable[[int], int], reserved_bytes: int
) -> Side:
    """Return the side of a recorded history."""
    blocks: list[Block] = []
    live: dict[int, int] = {}  # address -> number of its block
    moments = []
    allocated = reserved = 0
    for index, entry in enumerate(entries):
        action, size, address = entry["action"], int(entry.get("size", 0)), int(entry.get("addr", 0))
        if action == "alloc":
            live[address] = len(blocks)
            blocks.append(Block(Kind(round_up(size), str(entry.get("where", "")), False), index, None))
            allocated += blocks[-1].kind.nbytes
        elif action == "free_completed" and address in live:
            number = live.pop(address)
            kind = blocks[number].kind._replace(is_workspace=number == len(blocks) - 1)
            blocks[number] = blocks[number]._replace(kind=kind, end=index)
            allocated -= kind.nbytes
        elif action in TAKEN:
            reserved += size
        elif action in GIVEN_BACK:
            reserved -= size
        else:
            continue
        moments.append((index, allocated, reserved))
    return Side(blocks=blocks, moments=moments, step=step, reserved_bytes=reserved_bytes)


def _traced_side(trace: StepTrace, profile: MemoryProfile, round_up: Callable[[int], int]) -> Side:
    """Return the side of a trace, from the history of its replay."""
    assert profile.snapshot is not None, "the replay has a timeline"
    entries = [{**entry, "where": _where(entry)} for entry in profile.snapshot["device_traces"][0]]
    last = f"step {trace.events[-1].step}" if trace.events else ""
    phases = (entry["frames"][-1]["filename"] if entry["frames"] else "" for entry in entries)
    first = next((index for index, phase in enumerate(phases) if phase == last), 0)
    side = _side(entries, range(first, len(entries)), round_up, profile.peak_reserved)
    blocks = []
    for block in side.blocks:
        kind = block.kind._replace(is_workspace=entries[block.begin]["category"] == "workspace")
        blocks.append(block._replace(kind=kind))
    return replace(side, blocks=blocks)


def _where(entry: Mapping[str, Any]) -> str:
    """Return the kind, operator (for a workspace the library's call) and module of a traced request."""
    if not entry["frames"]:
        return ""
    made = entry["frames"][0]
    module = "" if made["filename"] == "model" else made["filename"]
    return " ".join(filter(None, dict.fromkeys((entry["category"], entry["user_metadata"] or made["name"], module))))


def _bytes(kinds: Mapping[Kind, int]) -> int:
    return sum(count * kind.nbytes for kind, count in kinds.items())


def _workspace_bytes(kinds: Mapping[Kind, int]) -> int:
    return sum(count * kind.nbytes for kind, count in kinds.items() if kind.is_workspace)


def _match(measured: Sequence[Block], traced: Sequence[Block]) -> BlockMatch:
    all_kinds = Counter(block.kind for block in measured)
    only_measured = _apart(measured, traced)
    return BlockMatch(
        matched_count=all_kinds.total() - only_measured.total(),
        matched_bytes=_bytes(all_kinds) - _bytes(only_measured),
        only_measured=only_measured,
        only_traced=_apart(traced, measured),
    )


def _apart(side: Sequence[Block], other: Sequence[Block]) -> Counter[Kind]:
    """Return the blocks without an equally large one on the other side. Of equal blocks, possible workspaces remain."""
    missing = Counter(block.kind.nbytes for block in other)
    apart: Counter[Kind] = Counter()
    for kind in sorted((block.kind for block in side), key=lambda kind: kind.is_workspace):
        if missing[kind.nbytes] > 0:
            missing[kind.nbytes] -= 1
        else:
            apart[kind] += 1
    return apart
