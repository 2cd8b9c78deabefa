"""Parses and checks everything that arrives on a trial's socket, and records it in the trial's `Observed`.

Start reading at `ReportReader`. A trial runs third-party code, so its reports are not trusted. The first breach of the
rules is recorded as `Observed.broken`, and nothing more of that trial is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from conf.children.running import Ended
from conf.errors import ERROR_CHARACTERS, first_line, one_line, safe_text, shown
from warehouse.tables.schema import KERNEL_PHASES, KERNEL_SCHEMA, KERNEL_TIMINGS, METRICS, OOM_KINDS
from workers.telemetry.sensors import Sample
from workers.trial.body import LINE_BYTES

READINGS_KEPT = 100_000  # steps and samples: three hours at the usual ten a second
KERNELS_KEPT = 20_000  # rows of `kernels` of one trial
_NAME_CHARACTERS = 200
_KERNEL_CHARACTERS = 4_000  # characters of a kernel's name or its shapes
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = 1e18
_MOST_SIGNALS = 64
_LATEST_VIRTUAL_NS = 2**62

_FAILURES = ("oom", "crashed", "invalid")  # statuses that a trial may claim; only the worker sets `timeout`
_WINDOW_ENDS = ("steady", "max_seconds", "fixed")
_STEP_METRICS = frozenset({"step_time_ms", "allocated_mib", "reserved_mib"})
# Columns of `kernels` that a trial sets, with their types; the writer copies the others from its run.
KERNEL_COLUMNS = {
    name: str(KERNEL_SCHEMA.field(name).type)
    for name in (
        "phase",
        "operator",
        "dims",
        "dtype",
        "kernel",
        "grid_x",
        "grid_y",
        "grid_z",
        "block_x",
        "block_y",
        "block_z",
        "blocks_per_sm",
        "warps_per_sm",
        "registers_per_thread",
        "shared_memory_bytes",
        "stream",
        "duration_us",
        "count",
        "steps",
        "timing",
    )
}
# Columns of `runs` that a trial sets.
_LABELS = frozenset({"peak_memory_mib", "peak_reserved_mib", "peak_allocated_mib", "step_time_ms", "steps", "energy_j"})
_RANK_LABELS = _LABELS | {"exposed_ms", "communication_ms", "sent_mib"}  # columns of `ranks` that a trial sets


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process that ended before it had a result, and so ended the trial. `code` is negative for a signal."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial's description of its failure; `rank` is the failed one of several."""

    status: str
    oom_kind: str | None
    error_type: str
    error: str
    device_fault: bool
    values: dict[str, float]
    rank: int | None = None


@dataclass
class Observed:
    """Reports and samples of one trial. Times come from `time.monotonic_ns`, or from a virtual clock that starts at 0.

    backend     cuda, cpu or simulated
    t0_ns       start of the trial
    samples     readings of the sensors
    values      column -> figure that the trial reported
    shared      whether other trials of its group were on the device, so that the device's figures include theirs
    oom_kills   the kernel's out-of-memory kills between boot and the trial's start
    status, oom_kind, clock_drift_s: known once the trial has ended; the last is how far the wall clock ran ahead of
                the monotonic one
    """

    backend: str = "cuda"
    t0_ns: int = 0
    device_memory_mib: float | None = None
    status: str = "ok"
    oom_kind: str | None = None
    clock_drift_s: float = 0.0
    samples: list[tuple[str, Sample]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    half_widths: dict[str, float] = field(default_factory=dict)  # label -> half-width of its 95 % confidence interval
    kernels: list[dict[str, Any]] = field(default_factory=list)  # rows of `kernels`
    profiled: bool = False  # all reports of kernels have arrived; `profile_problem` says why there are none
    profile_problem: str | None = None
    rank_values: dict[int, dict[str, Any]] = field(default_factory=dict)  # labels that each rank reported
    rank_pids: tuple[int, ...] = ()  # processes of the ranks, in order
    rank_ended: RankEnded | None = None
    failure: Failure | None = None
    broken: str | None = None  # first breach of the rules, quoted, shortened and printable
    finished: bool = False
    prepared: bool = False
    shared: bool = False
    oom_kills: int = 0
    warm: bool = False  # the trial waits until its window may open
    warmup_ns: int | None = None
    window_ns: int | None = None
    window_end_ns: int | None = None
    exit: Ended = Ended(None)  # noqa: RUF009  a tuple
    timed_out: bool = False
    killed_for: str | None = None  # why it was killed, other than the deadline


BROKEN = "broken"  # the event of a trial that broke the rules
ENDINGS = ("result", "failed", "rank_ended")  # events after which a trial waits for `bye`


class _Broken(ValueError):
    pass


class ReportReader:
    """Records a trial's reports in `observed`; buffers at most `LINE_BYTES`. Use from one thread.

    Times must lie between `since_ns` and now (monotonic); a virtual clock (`virtual=True`) starts at 0. After a result,
    a failure or a breach of the rules, everything is ignored. With `kernels`, at most `KERNELS_KEPT` kernels of the
    step follow the result. Beyond `READINGS_KEPT`, readings are only counted. With several `ranks`, reports of a
    step or a failure name their rank.
    """

    def __init__(
        self,
        since_ns: int = 0,
        virtual: bool = False,
        kernels: bool = False,
        ranks: int = 1,
    ) -> None:
        self.observed = Observed()
        self.since_ns = since_ns
        self.virtual = virtual
        self.kernels = kernels
        self.ranks = ranks
        self._finished = False
        self.readings = 0  # all of them; those beyond `READINGS_KEPT` are only counted
        self._buffer = bytearray()
        self._reported: dict[str, int] = {}  # event that may come only once -> its time, or 0
        self._over = False

    def feed(self, data: bytes) -> Iterator[str]:
        """Record the events that `data` completes and yield the name of each; yield `BROKEN` after a breach.

        An unfinished line waits for more data.
        """
        if self._over:
            return
        self._buffer += data
        lines = []
        if b"\n" in data:
            *full_lines, remainder = self._buffer.split(b"\n")
            lines, self._buffer = [bytes(line) for line in full_lines], remainder
        try:
            for line in lines:
                event, is_kept = self._read(line)
                if is_kept:
                    yield event
                if self._over:
                    return
            if len(self._buffer) > LINE_BYTES:
                raise _Broken(f"a report of more than {LINE_BYTES:,} bytes: {shown(bytes(self._buffer))}")
        except _Broken as broken:
            self._over = True
            self._buffer.clear()
            self.observed.broken = str(broken)
            yield BROKEN

    def _read(self, line: bytes) -> tuple[str, bool]:
        """Record one event; return its name, and whether it was kept rather than only counted."""
        try:
            if len(line) > LINE_BYTES:
                raise _Broken(f"more than {LINE_BYTES:,} bytes")
            message = json.loads(line)
            event = message.pop("event")
            if self._finished != (event in _AFTER_RESULT):
                raise _Broken(f"{event!r} cannot come {'after' if self._finished else 'before'} the result")
            return event, _EVENTS[event](self, **message) is not False
        except Exception as broken:  # whatever is wrong with a value, a key, or the line as a whole
            reason = one_line(first_line(broken))[:_NAME_CHARACTERS]
            raise _Broken(f"a report against the rules ({reason}): {shown(line)}") from None

    def _built(self, parameters: Any) -> None:
        self._once("built")
        self.observed.values["parameters"] = _integer("parameters", parameters)

    def _environment(self, cudnn_version: Any) -> None:
        self._once("environment")
        self.observed.values["cudnn_version"] = None if cudnn_version is None else _name(cudnn_version)

    def _warmup(self, t_ns: Any) -> None:
        if self.ranks > 1 and not self.virtual and not self.observed.rank_pids:
            raise _Broken("the ranks' processes come first")
        self.observed.warmup_ns = self._once("warmup", self._time("t_ns", t_ns))

    def _warm(self, t_ns: Any) -> None:
        self._once("warm", self._time("t_ns", t_ns, after="warmup"))
        self.observed.warm = True

    def _window(self, t_ns: Any) -> None:
        self.observed.window_ns = self._once("window", self._time("t_ns", t_ns, after="warmup"))

    def _step(self, t_ns: Any, values: Any, rank: Any = None) -> bool:
        return self._keep("torch", t_ns, _numbers(values, _STEP_METRICS), rank)

    def _sample(self, sensor: Any, t_ns: Any, values: Any, rank: Any = None) -> bool:
        if not self.virtual or sensor != "simulated":
            raise _Broken("only a simulated device reports samples of its own")
        return self._keep(sensor, t_ns, _numbers(values, METRICS.keys()), rank)

    def _keep(self, sensor: str, t_ns: Any, values: dict[str, float], rank: Any) -> bool:
        """Keep a reading, with its rank if the trial has several. Return False if it is only counted."""
        sample = Sample(self._time("t_ns", t_ns, after="warmup"), values, rank=self._rank_or_none(rank))
        self.readings += 1
        if self.readings > READINGS_KEPT:
            return False
        self.observed.samples.append((sensor, sample))
        return True

    def _ranks(self, pids: Any) -> None:
        self._once("ranks")
        if self.virtual or len(pids) != self.ranks or self.ranks == 1:
            raise _Broken(f"there must be {self.ranks} processes, of a trial of several ranks")
        self.observed.rank_pids = tuple(_integer("pids", pid) for pid in pids)

    def _rank(self, rank: Any, values: Any) -> None:
        number = self._number_of_rank(rank)
        self._once(f"rank {number}")
        values.pop("half_widths", None)  # the trial's result has those of the first rank
        self.observed.rank_values[number] = _labels(values, _RANK_LABELS)

    def _rank_ended(self, rank: Any, code: Any) -> None:
        self.observed.rank_ended = RankEnded(self._number_of_rank(rank), _integer("code", code, -_MOST_SIGNALS))
        self._over = True

    def _rank_or_none(self, rank: Any) -> int | None:
        return None if rank is None else self._number_of_rank(rank)

    def _number_of_rank(self, rank: Any) -> int:
        number = _integer("rank", rank)
        if self.ranks == 1 or number >= self.ranks:
            raise _Broken(f"rank must be one of the trial's {self.ranks}")
        return number

    def _result(self, window_end_ns: Any, window_ended: Any, values: Any) -> None:
        observed = self.observed
        end_ns = self._time("window_end_ns", window_end_ns, after="window")
        if window_ended not in _WINDOW_ENDS:
            raise _Broken(f"window_ended must be one of {', '.join(_WINDOW_ENDS)}")
        half_widths = _numbers(values.pop("half_widths", {}), _STEP_METRICS)
        observed.values |= {"window_ended": window_ended, **_labels(values)}
        observed.half_widths |= half_widths
        observed.window_end_ns, observed.finished = end_ns, True
        self._over, self._finished = not self.kernels, True

    def _failed(
        self,
        status: Any,
        oom_kind: Any,
        error_type: Any,
        error: Any,
        device_fault: Any,
        values: Any,
        rank: Any = None,
    ) -> None:
        if status not in _FAILURES or oom_kind not in (OOM_KINDS if status == "oom" else (None,)):
            raise _Broken(f"status must be one of {', '.join(_FAILURES)}, and only an oom has an oom_kind")
        failure = Failure(
            status=status,
            oom_kind=oom_kind,
            error_type=_name(error_type),
            error=safe_text(error, ERROR_CHARACTERS + 1000),  # room for the note with which the sender shortened it
            device_fault=device_fault is True,
            values=_labels(values),
            rank=self._rank_or_none(rank),
        )
        self.observed.failure = failure
        self.observed.values |= failure.values
        if failure.rank is not None:
            self.observed.rank_values[failure.rank] = failure.values
        self._over = True

    def _kernels(self, rows: Any) -> None:
        self.observed.kernels += [_kernel(row) for row in rows]
        if len(self.observed.kernels) > KERNELS_KEPT:
            raise _Broken(f"more than {KERNELS_KEPT:,} kernels")

    def _profiled(self, problem: Any) -> None:
        self._over = True
        self.observed.profile_problem = None if problem is None else safe_text(problem, _KERNEL_CHARACTERS)
        self.observed.profiled = True

    def _once(self, event: str, t_ns: int = 0) -> int:
        if event in self._reported:
            raise _Broken(f"a second {event!r}")
        self._reported[event] = t_ns
        return t_ns

    def _time(self, key: str, t_ns: Any, after: str | None = None) -> int:
        """Return the time if it is possible: not before the trial or the event `after`, not in the future."""
        if after is not None and after not in self._reported:
            raise _Broken(f"nothing like this comes before {after!r}")
        earliest_ns = self._reported[after] if after is not None else 0 if self.virtual else self.since_ns
        latest_ns = _LATEST_VIRTUAL_NS if self.virtual else time.monotonic_ns()
        time_ns = _integer(key, t_ns)
        if not earliest_ns <= time_ns <= latest_ns:
            raise _Broken(f"{key} must lie between {earliest_ns} and {latest_ns}")
        return time_ns


_EVENTS: dict[str, Callable[..., bool | None]] = {
    "built": ReportReader._built,
    "environment": ReportReader._environment,
    "warmup": ReportReader._warmup,
    "warm": ReportReader._warm,
    "window": ReportReader._window,
    "step": ReportReader._step,
    "sample": ReportReader._sample,
    "ranks": ReportReader._ranks,
    "rank": ReportReader._rank,
    "rank_ended": ReportReader._rank_ended,
    "result": ReportReader._result,
    "kernels": ReportReader._kernels,
    "profiled": ReportReader._profiled,
    "failed": ReportReader._failed,
}
_AFTER_RESULT = frozenset({"kernels", "profiled"})


def _kernel(row: Any) -> dict[str, Any]:
    """Return a checked row of `kernels` from a trial's report; missing columns are NULL."""
    checked: dict[str, Any] = {}
    for name, value in row.items():
        if name not in KERNEL_COLUMNS:
            raise _Broken(f"{name!a} is not a column that a trial sets in kernels")
        if value is None:
            continue
        kind = KERNEL_COLUMNS[name]
        if kind == "string":
            checked[name] = safe_text(value, _KERNEL_CHARACTERS).replace("\n", " ")
        else:
            checked[name] = _integer(name, value) if kind == "int64" else _number(name, value)
    if "dims" in checked:
        json.loads(checked["dims"])
    if not checked.keys() >= {"operator", "duration_us", "count", "timing"} or checked["timing"] not in KERNEL_TIMINGS:
        raise _Broken("a kernel must have operator, duration_us, count and timing")
    if checked.get("phase") not in (None, *KERNEL_PHASES):
        raise _Broken(f"phase must be one of {', '.join(KERNEL_PHASES)}")
    return checked


def _integer(key: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST_INTEGER:
        raise _Broken(f"{key} must be an integer >= {least} that fits into 64 bits")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST_NUMBER:
        raise _Broken(f"{key} must be a finite number >= 0")  # nan fails every comparison
    return float(value)


def _numbers(values: Any, known: Any) -> dict[str, float]:
    if others := values.keys() - known:
        raise _Broken(f"{min(others)!a} is not a figure of this event")
    return {key: _number(key, value) for key, value in values.items()}


def _labels(values: Any, known: frozenset[str] = _LABELS) -> dict[str, float]:
    labels: dict[str, float] = _numbers(values, known)
    if "steps" in labels:
        labels["steps"] = _integer("steps", values["steps"])
    return labels


def _name(value: Any) -> str:
    return safe_text(value, _NAME_CHARACTERS).replace("\n", " ")
