"""Canaries: a few fixed configurations, run every night to check that the machine measures as before.

Start reading at `canary_configs`, which lists them, then at `compare`, which reads their runs night by night
(`read_nights`), judges them, and names `causes` of labels that moved.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from conf.errors import UsageError, error_line, first_few
from farm.nights.journal import CanariesPayload, ComparedLabel, DriftPayload, Environment
from featurize.configs.trial import TrialConfig, config_from_mapping, config_of_row
from featurize.device.device_spec import same_device
from featurize.families import layers_of
from featurize.job.layers import rough_memory_mib
from learn.rows.data import TARGETS
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RUN_RATIOS
from warehouse.reading.connection import select
from warehouse.tables.schema import ENVIRONMENT, reasons_of
from workers.quality import REASONS

PREFIX = "canary-"  # prefix of the ids of the jobs that canaries run in
LABELS = {target.column: target.unit for target in TARGETS.values()}
_ABOUT = (
    "run_id",
    "job_id",
    "config_hash",
    "config",
    "status",
    "error_type",
    "error",
    "quality",
    "quality_reasons",
    "telemetry_missing",
    "final",
    "device_name",
    "device_uuid",
    "started_at",
    "finished_at",
)
_CLOCK_SHARE = 0.05  # drop of the SM clock that is named as a cause
_HOTTER_C = 10.0
_LATEST = 3  # runs of the history whose telemetry is read
_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class CanaryRun:
    """One execution of a canary."""

    run_id: str
    job_id: str
    config_hash: str
    config: TrialConfig
    status: str
    error: str  # its exception in one line; empty without one
    trusted: bool  # its labels are not known to be wrong
    reasons: Mapping[str, str]  # runs.quality_reasons
    missing: Mapping[str, str]  # runs.telemetry_missing
    labels: Mapping[str, float | None]
    final: bool
    device_uuid: str | None
    environment: tuple[str | None, ...]  # values of `ENVIRONMENT`
    started_at: datetime.datetime  # when it was given up, if the start is unknown

    @property
    def name(self) -> str:
        """Return a readable name, which distinguishes two canaries of one family."""
        return f"{self.config.family} {self.config_hash[:6]}"


@dataclass(frozen=True)
class CanaryNight:
    """The canaries of one job, in the environment that they ran in (values of `ENVIRONMENT`)."""

    environment: tuple[str | None, ...]
    runs: tuple[CanaryRun, ...]


def read_nights(
    data: str | os.PathLike[str] | DataFolder,
    device_name: str,
    source: str,
    tonight: Collection[str],
    forget: Collection[str],
) -> tuple[CanaryNight | None, list[CanaryNight]]:
    """Return the canaries of the jobs `tonight` as one night, and earlier ones by job, oldest first.

    Restricted to the device and source. Earlier jobs are those whose id begins with `canary-`, except `forget`. A
    night's environment is that of its `ok` runs, since others may have ended before reporting it.
    """
    columns = (*_ABOUT, *ENVIRONMENT, *LABELS)
    rows = select(
        data,
        f"SELECT {', '.join(columns)} FROM attempts WHERE source = ? AND (starts_with(job_id, ?) "
        "OR list_contains(?::VARCHAR[], job_id)) ORDER BY coalesce(started_at, finished_at) NULLS FIRST, run_id",
        [source, PREFIX, list(tonight)],
    )
    jobs: dict[str, list[CanaryRun]] = {}
    for row in rows:
        # A lost run has no device; tonight's jobs are all of this one.
        ours = row["job_id"] in tonight if row["device_name"] is None else same_device(row["device_name"], device_name)
        run = _run(row) if ours else None
        if run is not None and (row["job_id"] in tonight or row["job_id"] not in forget):
            night = "" if run.job_id in tonight else run.job_id
            jobs.setdefault(night, []).append(run)
    now = jobs.pop("", None)
    began = min((run.started_at for run in now or ()), default=None)
    earlier = [_night(runs) for runs in jobs.values() if began is None or runs[0].started_at <= began]
    if now is None:
        return None, earlier
    return _night(now, earlier[-1].environment if earlier else None), earlier


def _night(runs: Sequence[CanaryRun], before: tuple[str | None, ...] | None = None) -> CanaryNight:
    environments = Counter(run.environment for run in runs if run.status == "ok")
    if environments:
        return CanaryNight(environments.most_common(1)[0][0], tuple(runs))
    columns = zip(*(run.environment for run in runs), strict=True)
    known = tuple(next((value for value in column if value is not None), None) for column in columns)
    # No run reported all of it: assume the earlier environment unless a value contradicts it.
    if before is not None and all(column in (None, other) for column, other in zip(known, before, strict=True)):
        known = before
    return CanaryNight(known, tuple(runs))


def _run(row: Mapping[str, Any]) -> CanaryRun | None:
    try:
        config = config_of_row(row["config"])
    except UsageError:  # from another version of the code
        return None
    return CanaryRun(
        run_id=row["run_id"],
        job_id=row["job_id"],
        config_hash=row["config_hash"],
        config=config,
        status=row["status"],
        error=error_line(row["error"] or row["error_type"] or ""),
        trusted=row["quality"] != "untrusted",
        reasons=reasons_of(row["quality_reasons"]),
        missing=reasons_of(row["telemetry_missing"]),
        labels={name: row[name] for name in LABELS},
        final=row["final"] is not False,
        device_uuid=row["device_uuid"],
        environment=tuple(row[name] for name in ENVIRONMENT),
        started_at=row["started_at"] or row["finished_at"] or datetime.datetime.min,
    )


def causes(
    data: str | os.PathLike[str] | DataFolder,
    runs: Mapping[str, Sequence[CanaryRun]],
    history: Mapping[str, Sequence[CanaryRun]],
    moved: Sequence[ComparedLabel],
) -> tuple[str, ...]:
    """Return possible causes of labels that moved, in words, the most common first; empty if no cause is known.

    `runs`: tonight's by config_hash; `history`: those that they were compared with.
    """
    names_by_cause: dict[str, list[str]] = {}
    now: list[CanaryRun] = []
    latest: list[CanaryRun] = []
    for config_hash in dict.fromkeys(entry.config_hash for entry in moved):
        canary_runs, before = runs[config_hash], history.get(config_hash, ())
        lost = [e.label for e in moved if e.config_hash == config_hash and e.label in LABELS and e.now is None]
        now += canary_runs
        latest += before[-_LATEST:]
        for cause, words in _causes_of(canary_runs, before, lost):
            names_by_cause.setdefault(cause, []).append(
                f"{canary_runs[0].name}: {words}" if words else canary_runs[0].name
            )
    most_first = sorted(names_by_cause.items(), key=lambda item: -len(item[1]))
    sentences = [f"{cause} ({first_few(names, _EXAMPLES)})" for cause, names in most_first]
    return (*sentences, *_thermal_causes(data, now, latest))


def _causes_of(runs: Sequence[CanaryRun], history: Sequence[CanaryRun], lost: Collection[str]) -> list[tuple[str, str]]:
    """Return (cause, details) of one canary, without causes that were present before."""
    reasons = []
    usual = Counter(reason for run in history for reason in run.reasons)
    for reason in dict.fromkeys(reason for run in runs for reason in run.reasons):
        if 2 * usual[reason] > len(history):
            continue
        words = next(run.reasons[reason] for run in runs if reason in run.reasons)
        meaning = REASONS[reason].meaning if reason in REASONS else reason
        reasons.append((meaning, words))
    if lost:
        sensors = {name: why for run in runs for name, why in run.missing.items()}
        known = {name for run in history for name in run.missing}
        why = ", ".join(f"{name}: {text}" for name, text in sensors.items() if name not in known)
        reasons.append(("a sensor gave nothing", ", ".join(sorted(lost)) + (f" ({why})" if why else "")))
    failed = next((run for run in runs if run.status != "ok"), None)
    if failed is not None:  # only canaries that moved get here, and an accepted failure has not moved
        reasons.append((f"ended as {failed.status}", failed.error))
    return reasons


def _thermal_causes(
    data: str | os.PathLike[str] | DataFolder, now: Sequence[CanaryRun], before: Sequence[CanaryRun]
) -> list[str]:
    """Return differences in clocks and temperatures between tonight's windows and earlier ones."""
    families = sorted({run.config.family for run in now})
    rows = select(
        data,
        "SELECT is_now, median(clock_mhz) AS clock_mhz, median(heat_c) AS heat_c FROM ("
        "SELECT list_contains(?::VARCHAR[], run_id) AS is_now, median(sm_clock_mhz) AS clock_mhz, "
        "max(temperature_c) AS heat_c FROM telemetry WHERE phase = 'window' "
        f"AND family IN ({', '.join('?' * len(families))}) AND list_contains(?::VARCHAR[], run_id) "
        "GROUP BY run_id) GROUP BY is_now",
        [[run.run_id for run in now], *families, [run.run_id for run in (*now, *before)]],
    )
    by_side = {row["is_now"]: (row["clock_mhz"], row["heat_c"]) for row in rows}
    (clock_now, heat_now), (clock_then, heat_then) = (by_side.get(side, (None, None)) for side in (True, False))
    sentences = []
    if clock_now is not None and clock_then is not None and clock_now < (1 - _CLOCK_SHARE) * clock_then:
        sentences.append(f"the SM clock was lower: {clock_now:.0f} MHz, {clock_then:.0f} before")
    if heat_now is not None and heat_then is not None and heat_now > heat_then + _HOTTER_C:
        sentences.append(f"the GPU was hotter: {heat_now:.0f} °C, {heat_then:.0f} before")
    return sentences


MEMORY = "peak_memory_mib"

# Never change an entry, or a default that it relies on: its hash links tonight's runs to earlier nights. Each is small.
# Their different operator families show which ones moved (`farm.nights.watch`): batch norm without convolutions,
# convolutions without batch norm, embeddings without attention, half precision in two of them.
_CANARIES = (
    {
        "family": "mlp",
        "batch_size": 256,
        "optimizer": "sgd",
        "input_size": 1536,
        "classes": 100,
        "depth": 3,
        "topology": "uniform",
    },
    {
        "family": "mlp",
        "batch_size": 256,
        "optimizer": "momentum",
        "input_size": 1024,
        "classes": 100,
        "depth": 4,
        "topology": "uniform",
        "batch_norm": True,
    },
    {
        "family": "cnn",
        "batch_size": 32,
        "optimizer": "adam",
        "precision": "bf16",
        "image_size": 32,
        "channels": 3,
        "classes": 10,
        "base_filters": 48,
        "depth": 4,
        "topology": "uniform",
        "pooling": True,
        "pool_interval": 2,
    },
    {
        "family": "transformer",
        "batch_size": 8,
        "optimizer": "adamw",
        "vocabulary_size": 8000,
        "sequence_length": 128,
        "embedding_size": 256,
        "heads": 4,
        "depth": 2,
        "feed_forward": 1024,
        "classes": 10,
        "dropout": 0.1,
    },
    {
        "family": "gpt",
        "batch_size": 4,
        "optimizer": "adamw",
        "precision": "bf16",
        "vocabulary_size": 8000,
        "sequence_length": 128,
        "embedding_size": 256,
        "heads": 4,
        "depth": 2,
        "feed_forward": 1024,
        "dropout": 0.0,
    },
    {
        "family": "rnn",
        "batch_size": 32,
        "optimizer": "sgd",
        "vocabulary_size": 8000,
        "sequence_length": 64,
        "embedding_size": 256,
        "hidden_size": 256,
        "depth": 2,
    },
    {
        "family": "gnn",
        "batch_size": 4,
        "optimizer": "adam",
        "nodes": 1000,
        "degree": 10,
        "features": 128,
        "classes": 40,
        "hidden": 128,
        "depth": 3,
    },
    {
        "family": "unet",
        "batch_size": 4,
        "optimizer": "adam",
        "image_size": 64,
        "channels": 3,
        "classes": 4,
        "base_channels": 32,
        "depth": 3,
    },
)

# Memory of a context, library workspaces and allocator rounding beyond the rough figure, on any GPU.
_BESIDE_MIB = 1024.0

MEMORY_SHARE, MEMORY_MIB = 0.01, 2.0  # the larger of the two
SHARED_MEMORY_SHARE = 0.25  # share of host memory, where it moved by up to 11 % on a busy machine
RATIO = 0.05
TIME_AND_POWER_SHARE = 0.10
_COMPARED_IF_SHARED = (MEMORY,)  # labels compared on a device that serves other programs too
UNKNOWN = "unknown: neither the runs' quality nor their telemetry says why"
DEVIATIONS = 4.0  # robust standard deviations: a smaller shift never counts, whatever the tolerance
_TO_DEVIATION = 1.4826  # factor of a median absolute deviation, for normal noise
_LEAST_FOR_DEVIATION = 3  # runs; with two, an outlier would hide the next


def canary_configs(capacity_mib: float) -> tuple[TrialConfig, ...]:
    """Return the canaries that fit a device with `capacity_mib` MiB of memory, always in this order.

    None takes more than 0.3 GiB beyond its context, and a training step of each takes a CPU core under 0.2 s.
    """
    configs = [config_from_mapping(values) for values in _CANARIES]
    return tuple(
        config
        for config in configs
        if rough_memory_mib(layers_of(config), config.batch_size, config.optimizer) + _BESIDE_MIB <= capacity_mib
    )


@dataclass(frozen=True, kw_only=True)
class CanaryVerdict(CanariesPayload):
    """The verdict, with its runs. `earlier`: nights of the history, oldest first; `shared` as in `compare`."""

    device_name: str
    source: str
    environment: Environment
    tonight: CanaryNight | None
    earlier: tuple[CanaryNight, ...]
    shared: bool

    @property
    def configs(self) -> dict[str, TrialConfig]:
        """Return tonight's canaries by config_hash."""
        return {run.config_hash: run.config for run in self.tonight.runs} if self.tonight else {}

    def payload(self, drift: DriftPayload | None = None) -> CanariesPayload:
        """Return the verdict as the journal stores it, with the drift."""
        values = {field.name: getattr(self, field.name) for field in fields(CanariesPayload)}
        return CanariesPayload(**{**values, "drift": drift})


def compare(
    data: str | os.PathLike[str] | DataFolder,
    device_name: str,
    source: str,
    job_ids: Collection[str],
    *,
    forget: Collection[str] = (),
    shared: bool = False,
    accepted: Collection[str] = (),
) -> CanaryVerdict:
    """Compare the canaries of the jobs `job_ids` with those of earlier jobs on the same device and source.

    The history is that of the same environment, however old, else that of the newest night. The median of all GPUs is
    compared, and each single GPU, since one of several may be sick. A canary that fails has moved, even without a
    history. Failed and untrusted runs do not count as history.

    Args:
        data: The data folder.
        device_name: The device's name, in any spelling.
        source: Source of the runs, `measured` or `simulated`.
        job_ids: Tonight's canary jobs.
        forget: Earlier jobs that do not count as history, such as those of sick nights.
        shared: The device serves other programs too, as a CPU does; only its memory is compared.
        accepted: Hashes of the canaries that the user allows to fail, until they run to their end once.
    """
    tonight, nights = read_nights(data, device_name, source, job_ids, forget)
    earlier = [night for night in nights if history_of(night.runs)]
    verdict = CanaryVerdict(
        verdict="none",
        said="no canary ran",
        device_name=device_name,
        source=source,
        environment=_name_columns(tonight.environment if tonight else (None,) * len(ENVIRONMENT)),
        runs=len(tonight.runs) if tonight else 0,
        tonight=tonight,
        earlier=tuple(earlier),
        shared=shared,
    )
    if tonight is None:
        return verdict
    now, runs = tonight.environment, final_runs(tonight)
    environments = [night.environment for night in earlier]
    reference = now if now in environments else environments[-1] if environments else None
    history = history_of([run for night in earlier if night.environment == reference for run in night.runs])
    together = compare_canaries(runs, history, shared, accepted)
    alone = _compare_single_gpus(runs, history, together, shared, accepted)
    verdict = replace(verdict, compared=(*together, *alone))
    if reference is None:
        return _judge_first_night(data, verdict, runs)
    verdict = replace(verdict, before=_name_columns(reference))
    if not verdict.moved:
        sentence = _steady_sentence(
            runs, history, verdict.compared, "" if now == environments[-1] else _change(environments[-1], now)
        )
        return replace(verdict, verdict="steady", said=sentence)
    # A run that failed or has untrusted labels shows nothing about a new environment.
    figures_only = all(entry.now is not None and entry.before is not None for entry in verdict.moved)
    is_drift = now != reference and figures_only and not alone
    why = causes(data, runs, history, verdict.moved) or (() if is_drift else (UNKNOWN,))
    change = f"with {_change(reference, now)}" if now != reference else "in an unchanged environment"
    examples = first_few([entry.said for entry in verdict.moved], _EXAMPLES)
    sentence = f"{len({entry.name for entry in verdict.moved})} of {_canaries(runs)} moved ({examples}) {change}"
    if is_drift:
        return replace(verdict, verdict="drift", said=sentence, causes=why)
    return replace(verdict, verdict="sick", said=f"{sentence}: {why[0]}", causes=why)


def canaries_to_confirm(verdict: CanaryVerdict) -> tuple[TrialConfig, ...]:
    """Return the canaries that moved and ran only once tonight, or only once on the GPU where they moved.

    They run twice more before the verdict counts."""
    once = {entry.config_hash for entry in verdict.moved if len(entry.run_ids) == 1}
    return tuple(config for config_hash, config in verdict.configs.items() if config_hash in once)


def _judge_first_night(
    data: str | os.PathLike[str] | DataFolder, verdict: CanaryVerdict, runs: Mapping[str, Sequence[CanaryRun]]
) -> CanaryVerdict:
    """Return the verdict on canaries that no earlier night can be compared with."""
    if failed := verdict.moved:
        why = causes(data, runs, {}, failed)
        names = {entry.name for entry in failed}
        sentence = f"{len(names)} of the first {_canaries(runs)} of this device failed: {'; '.join(why)}"
        return replace(verdict, verdict="sick", said=sentence, causes=why)
    doubted = [entry for entry in verdict.compared if entry.label == "quality"]
    sentence = f"the first {_canaries(runs)} of this device; there is nothing to compare them with yet"
    sentence += _accepted_failures(verdict.compared)
    if doubted:
        sentence += f"; {len(doubted)} of them cannot be trusted"
    why = causes(data, runs, {}, doubted) if doubted else ()
    return replace(verdict, verdict="first", said=sentence, causes=why)


def _steady_sentence(
    runs: Mapping[str, Sequence[CanaryRun]],
    history: Mapping[str, Sequence[CanaryRun]],
    entries: Sequence[ComparedLabel],
    change: str,
) -> str:
    failing = {entry.config_hash for entry in entries if entry.label == "status"}
    known, new = (failing ^ runs.keys()) & history.keys(), runs.keys() - failing - history.keys()
    sentence = f"{_canaries(known)} as before{f', with {change}' if change else ''}"
    sentence += f"; {_canaries(new)} for the first time" if new else ""
    return sentence + _accepted_failures(entries)


def _name_columns(environment: Sequence[str | None]) -> dict[str, str | None]:
    return dict(zip(ENVIRONMENT, environment, strict=True))


def final_runs(night: CanaryNight) -> dict[str, tuple[CanaryRun, ...]]:
    """Return the night's runs by config_hash, without attempts that were run again."""
    return _by_config(run for run in night.runs if run.final)


def history_of(runs: Iterable[CanaryRun]) -> dict[str, tuple[CanaryRun, ...]]:
    """Return the trusted `ok` runs of earlier nights by config_hash, oldest first."""
    return _by_config(run for run in runs if run.final and run.trusted and run.status == "ok")


def _by_config(runs: Iterable[CanaryRun]) -> dict[str, tuple[CanaryRun, ...]]:
    by_config: dict[str, tuple[CanaryRun, ...]] = {}
    for run in runs:
        by_config[run.config_hash] = (*by_config.get(run.config_hash, ()), run)
    return by_config


def compare_canaries(
    runs: Mapping[str, Sequence[CanaryRun]],
    history: Mapping[str, Sequence[CanaryRun]],
    shared: bool = False,
    accepted: Collection[str] = (),
) -> list[ComparedLabel]:
    """Compare every label of each canary that ran with its history, if it has one.

    `shared` and `accepted` as in `compare`."""
    return [
        entry
        for config_hash in runs
        for entry in _compare_canary(
            runs[config_hash], history.get(config_hash, ()), shared, may_fail=config_hash in accepted
        )
    ]


def _compare_single_gpus(
    runs: Mapping[str, Sequence[CanaryRun]],
    history: Mapping[str, Sequence[CanaryRun]],
    together: Sequence[ComparedLabel],
    shared: bool,
    accepted: Collection[str],
) -> list[ComparedLabel]:
    """Return the labels that moved on one of several GPUs and not in the median of all."""
    gpus = sorted({run.device_uuid for canary_runs in runs.values() for run in canary_runs if run.device_uuid})
    if len(gpus) < 2:
        return []
    known = {(entry.config_hash, entry.label) for entry in together if entry.moved}
    on_one_gpu = []
    for gpu in gpus:
        on_gpu = {name: [run for run in canary_runs if run.device_uuid == gpu] for name, canary_runs in runs.items()}
        entries = compare_canaries(
            {name: gpu_runs for name, gpu_runs in on_gpu.items() if gpu_runs}, history, shared, accepted
        )
        on_one_gpu += [
            replace(entry, said=f"{entry.said} on {gpu} alone")
            for entry in entries
            if entry.moved and (entry.config_hash, entry.label) not in known
        ]
    return on_one_gpu


def _compare_canary(
    runs: Sequence[CanaryRun], history: Sequence[CanaryRun], shared: bool, may_fail: bool
) -> list[ComparedLabel]:
    trusted = [run for run in runs if run.trusted]
    status = statistics.mode(run.status for run in trusted or runs)
    name, ids = runs[0].name, tuple(run.run_id for run in runs)
    compared = ComparedLabel(
        family=runs[0].config.family, config_hash=runs[0].config_hash, history_runs=len(history), run_ids=ids
    )
    if 2 * len(trusted) < len(runs) and status == "ok":
        reasons = ", ".join(dict.fromkeys(reason for run in runs for reason in run.reasons)) or "no reason given"
        return [replace(compared, label="quality", moved=bool(history), said=f"{name}: untrusted ({reasons})")]
    if status != "ok":
        ended = "as accepted" if may_fail else "and it has never been ok here"
        ended = f"ok before, {status} now" if history else f"{status}, {ended}"
        moved = bool(history) or not may_fail
        return [replace(compared, label="status", moved=moved, said=f"{name}: {ended}")]
    entries = []
    for label, unit in LABELS.items():
        known = [value for run in history if (value := run.labels[label]) is not None]
        measured = [value for run in trusted if run.status == "ok" and (value := run.labels[label]) is not None]
        if (shared and label not in _COMPARED_IF_SHARED) or not (known or measured):
            continue
        before, now = (statistics.median(values) if values else None for values in (known, measured))
        figures = " -> ".join(_figure(value, unit) for value in (before, now) if value is not None)
        tolerance, moved = None, False
        if before is not None:
            tolerance = tolerance_of(label, known, shared)
            moved = len(known) == len(history) if now is None else abs(now - before) > tolerance
            figures += " before, NULL now" if now is None else ""
        entries.append(
            replace(
                compared,
                label=label,
                unit=unit,
                before=before,
                now=now,
                tolerance=tolerance,
                moved=moved,
                history_runs=len(known),
                said=f"{name}: {label} {figures}",
            )
        )
    return entries


def tolerance_of(label: str, history: Sequence[float], shared: bool = False) -> float:
    """Return the largest difference from the history's median, in the label's unit, that does not count as moved."""
    middle = statistics.median(history)
    if label == MEMORY:
        least = max((SHARED_MEMORY_SHARE if shared else MEMORY_SHARE) * abs(middle), MEMORY_MIB)
    elif label in RUN_RATIOS:
        least = RATIO
    else:
        least = TIME_AND_POWER_SHARE * abs(middle)
    if len(history) < _LEAST_FOR_DEVIATION:
        return least
    deviation = _TO_DEVIATION * statistics.median(abs(value - middle) for value in history)
    return max(least, DEVIATIONS * deviation)


def _figure(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "ratio" else f"{value:,.4g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _canaries(runs: Collection[object]) -> str:
    return f"{len(runs)} {'canary' if len(runs) == 1 else 'canaries'}"


def _accepted_failures(entries: Sequence[ComparedLabel]) -> str:
    """Return the text about canaries whose failure the user accepted; they are not compared."""
    return "".join(f"; {entry.said}" for entry in entries if entry.label == "status" and not entry.moved)


def _change(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Return the changed columns as text, such as `torch_version 2.12.0 -> 2.13.0`."""
    changed = [f"{name} {old} -> {new}" for name, old, new in zip(ENVIRONMENT, before, now, strict=True) if old != new]
    return ", ".join(changed)
