"""`make collect-gpu`: measure runs of every family on a GPU for a limited time, and add them to the data set.

Start reading at `collect`. `python -m infra.collect minutes=9` continues where the last one stopped. Each round has
trials of every family, so an early end leaves some of each. `measure=kernels` and the others work the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.cli.command_line import EXIT_INTERRUPTED, command, load_settings
from conf.cli.settings import Checked, key
from conf.errors import CommandError, UsageError
from conf.plain_text import count_of
from farm.dispatch.dispatcher import work
from farm.queue.jobs import Queue
from farm.submission.submitting import SubmitSettings, require_gpus, submit
from featurize.configs.space import Choice, Range, Space, default_space, own_space
from featurize.families import family_names
from featurize.job.training_settings import OPTIMIZERS, PRECISIONS, Optimizer
from warehouse.exchange.dataset import ExportSettings, export
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import select
from workers.devices import choose_device

# Values to sample where a family's space fixes them.
TRAINING = {
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "activation_checkpointing": (False, True),
    "cudnn_benchmark": (False, True),
    "channels_last": (False, True),
}
PAIRS = "pairs"
# Memory share of the card that trials may use -> share of a family's trials; `pairs` run each trial at several batch
# sizes on the whole card.
SHARES: dict[float | str, float] = {1.0: 0.7, 0.5: 0.1, 0.25: 0.1, PAIRS: 0.1}
_PAIR_SIZES = 4
# Total trials of each family by the end of a round. The first round uses whole cards only.
_FIRST_ROUNDS, _ROUND = (1, 2), 10
_LEAVE_S = 75.0  # before the end: time to finish running trials and to write the data set
# Runs for the data set, their kernels, pairs on one GPU, trials on two GPUs, power at several loads.
MEASURED = ("runs", "kernels", "pairs", "ranks", "power")
# Families by measurement, if it does not take all: pairs and ranks take one of each kind, power differing loads.
_FAMILIES = {
    "pairs": ("cnn", "gpt", "mlp", "rnn", "transformer", "vit"),
    "ranks": ("cnn", "gpt", "mlp", "transformer"),
    "power": ("cnn", "gpt", "mlp"),
}
_PAIRED_ON_CPU = ("cnn", "mlp")  # hardly any trial of the others is small enough
_KERNEL_STEPS = 3
_LAYOUTS = "parallel=[{ddp: 2},{fsdp: 2},{fsdp: 2, fsdp_version: 1}]"
_POWER_WINDOW_S = 10
_CPU_WINDOW_S = 2
_ON_CPU = ("limits.max_memory_mib=600", "limits.max_parameters=20000000", "window.warmup_max_seconds=5")
_EXPORTED = {"cuda": "measured", "cpu": "cpu", "simulated": "simulated"}


@dataclass(frozen=True, kw_only=True)
class CollectSettings(Checked):
    """The keys."""

    measure: str = key("runs", choices=MEASURED)
    families: tuple[str, ...] = key((), kind="text | list of text", choices=family_names())
    n: int = key(420, "trials of each family", "int 1 to 10000000")
    seed: int = key(0, "another seed draws other trials", "int >= 0")
    device: str = key("cuda", choices=tuple(_EXPORTED))
    minutes: float | None = key(None, "default: until all are done", "number 0 to 1e6")
    cluster: str = key("inline", "one GPU; local: all of this machine's, by Ray")
    timeout_s: float = key(120, kind="number 1 to 1e7")
    data: str = key("data/collect", kind="new path")
    export: bool = key(True, "false: leave the rows in the data folder")
    out: str | None = key(None, kind="new path")
    max_mb: float = key(20, kind="number > 0")
    overrides: tuple[str, ...] = key((), "of farm.submit, for every job", "text | list of text")

    def problems(self) -> Iterator[str]:
        if self.export and self.device != "cuda" and self.out is None:
            yield "out=... is missing: only what a GPU measured goes into datasets/"


def submissions(settings: CollectSettings) -> dict[str, list[tuple[float, SubmitSettings]]]:
    """Return the submissions by name, each with its share of a round's trials. Raises `UsageError`."""
    families = settings.families or _FAMILIES.get(settings.measure, family_names())
    if settings.measure == "runs":
        return {
            family: [(SHARES[share], job) for share, job in jobs_of(family, settings).items()] for family in families
        }
    common = _common(settings)
    if settings.measure == "pairs":
        if settings.device == "cpu" and not settings.families:
            families = _PAIRED_ON_CPU
        together = ("+collocate=pairs", f"arch=[{','.join(families)}]")
        ways = ("time_slicing",) if settings.device == "cpu" else ("time_slicing", "mps")
        return {way: [(1.0, _submission(*together, *common, *settings.overrides, f"sharing={way}"))] for way in ways}
    each = {}
    for family in families:
        if settings.measure == "kernels":
            family_settings = [*_vary(family, settings.device), f"kernels.steps={_KERNEL_STEPS}"]
        elif settings.measure == "ranks":
            family_settings = [_LAYOUTS]
        else:
            smallest, *_, largest = pair_sizes(own_space(family))
            family_settings = [f"batch_sizes=[{smallest},{largest}]"]
        each[family] = [(1.0, _submission(f"+arch={family}", *common, *family_settings, *settings.overrides))]
    return each


def jobs_of(family: str, settings: CollectSettings) -> dict[float | str, SubmitSettings]:
    """Return the family's submissions by key of `SHARES`; each samples the whole space and every training setting."""
    sampled = _vary(family, settings.device)
    composed = _submission(f"+arch={family}", *_common(settings), *sampled, *settings.overrides)
    jobs: dict[float | str, SubmitSettings] = {}
    for offset, share in enumerate(SHARES):
        job = dataclasses.replace(composed, seed=settings.seed * len(SHARES) + offset)
        if share == PAIRS:
            job = dataclasses.replace(job, batch_sizes=pair_sizes(own_space(family)))
        elif isinstance(share, float) and share != 1.0:
            if settings.device == "cpu":
                continue
            job = dataclasses.replace(job, device=dataclasses.replace(job.device, memory_fraction=share))
        jobs[share] = job
    return jobs


def _common(settings: CollectSettings) -> list[str]:
    window_s = _CPU_WINDOW_S if settings.device == "cpu" else _POWER_WINDOW_S
    if settings.measure == "power":
        window = ["window=fixed", f"window.seconds={window_s}"]
    else:
        window = [f"window.max_seconds={window_s}"] if settings.device == "cpu" else []
    return [
        "n=1",
        f"seed={settings.seed}",
        f"device={settings.device}",
        f"cluster={settings.cluster}",
        f"trial.timeout_s={settings.timeout_s}",
        *window,
        *(_ON_CPU if settings.device == "cpu" else ()),
    ]


def _submission(*overrides: str) -> SubmitSettings:
    submission = load_settings(SubmitSettings, overrides)
    choice, _ = choose_device(submission.device)
    for space in submission.spaces:
        require_gpus(space, choice, submission.cluster)
    return dataclasses.replace(submission, device=choice)


def optimizers_here(device: str) -> tuple[str, ...]:
    """Return the optimizers that run on this device with the installed packages; trials of others would be invalid."""

    def runs(known: Optimizer) -> bool:
        if device == "simulated" and known.cuda_only:
            return True
        on_device = device == "cuda" or not known.cuda_only
        return on_device and (known.package is None or importlib.util.find_spec(known.package) is not None)

    return tuple(name for name, known in OPTIMIZERS.items() if runs(known))


def _vary(family: str, device: str) -> list[str]:
    """Return overrides that make a family's space vary every training setting that `device` can run."""
    space = default_space(family)
    assert space is not None, "every family has its file in conf/arch"
    sampled = []
    for name, choices in {**TRAINING, "optimizer": optimizers_here(device)}.items():
        if name not in space or not isinstance(space[name], list | dict):
            choices_text = ",".join(str(choice).lower() for choice in choices)
            sampled.append(f"{'' if name in space else '+'}arch.space.{name}=[{choices_text}]")
    return sampled


def pair_sizes(space: Space) -> tuple[int, ...]:
    """Return batch sizes over the range that a space samples, spaced by a constant factor."""
    (dimension,) = (dimension for dimension in space.dimensions if dimension.name == "batch_size")
    if isinstance(dimension, Range):
        low, high = dimension.low, dimension.high
    elif isinstance(dimension, Choice):
        sizes = [choice for choice in dimension.choices if isinstance(choice, int)]
        low, high = min(sizes), max(sizes)
    else:
        assert isinstance(dimension.fixed, int), "a batch size is a whole number"
        low, high = max(1, dimension.fixed // 4), dimension.fixed * 2
    steps = range(_PAIR_SIZES)
    return tuple(sorted({round(low * (high / low) ** (i / (_PAIR_SIZES - 1))) for i in steps}))


def rounds(n: int) -> Iterator[int]:
    """Yield the total trials of a family by the end of each round."""
    yield from (total for total in (*_FIRST_ROUNDS, *range(_ROUND, n, _ROUND)) if total < n)
    yield n


def collect(settings: CollectSettings, say: Callable[[str], None] = print) -> bool:
    """Queue and run rounds until all are done or the time is up, then export. Returns whether all are done.

    A family whose space cannot be sampled here is reported and left out. Raises `UsageError` if no family is left.
    """
    until_s = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes - _LEAVE_S
    jobs = submissions(settings)
    folder = DataFolder.resolve(settings.data).create()
    finished = True
    with Queue.open(folder.queue) as queue:
        for total in rounds(settings.n):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                finished = False
                break
            for name in list(jobs):
                due = jobs[name][:1] if total == _FIRST_ROUNDS[0] else jobs[name]
                if not _queue(folder, queue, name, due, total, say):
                    del jobs[name]
            if not jobs:
                raise UsageError("no family is left to measure")
            say(f"round of {total} trials of each of {', '.join(jobs)}: {queue.pending()} to run")
            cluster = next(iter(jobs.values()))[0][1].cluster
            code = work(folder, queue, cluster, seconds=None if left_s == math.inf else left_s)
            if queue.pending() or (code == EXIT_INTERRUPTED and total < settings.n):
                finished = False
                break
    counts = run_counts(folder)
    if not counts:
        say("nothing has been measured yet; the same command goes on")
        return False
    say("\n".join(count_lines(counts)))
    if settings.export:
        out = ExportSettings(
            out=settings.out, data=settings.data, source=_EXPORTED[settings.device], max_mb=settings.max_mb
        )
        say("\n".join(export(out).lines()))
    say("all trials are done" if finished else "the time is up; the same command goes on where it was")
    return finished


def _queue(
    folder: DataFolder,
    queue: Queue,
    name: str,
    jobs: Sequence[tuple[float, SubmitSettings]],
    total: int,
    say: Callable[[str], None],
) -> bool:
    for share, submission in jobs:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                submit(folder, queue, dataclasses.replace(submission, n=math.ceil(share * total)))
        except CommandError as error:
            say(f"{name} is left out: {error}")
            return False
    return True


def run_counts(folder: DataFolder) -> list[dict[str, Any]]:
    """Count a data folder's runs by `family`, `status` and `quality`; `longest_s` is the longest run's time."""
    if not folder.format_marker.is_file():
        return []
    counts = "count(*) AS runs, max(wall_s) AS longest_s"
    return select(folder, f"SELECT family, status, quality, {counts} FROM runs GROUP BY ALL ORDER BY ALL")


def count_lines(counts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each family of `run_counts`, with its runs by status, then a line with the verdicts on all."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for counted in counts:
        groups[counted["family"]][counted["status"]] += counted["runs"]
    for counted in counts:
        groups["verdicts"][counted["quality"] or "none"] += counted["runs"]
    return [
        f"{name}: {count_of(tally.total(), 'run')} ({', '.join(f'{value} {count}' for value, count in tally.items())})"
        for name, tally in groups.items()
    ]


def entry(settings: CollectSettings) -> int:
    """Measure; return 130 if interrupted before all was done, 0 when the minutes ran out."""
    return 0 if collect(settings) or settings.minutes is not None else EXIT_INTERRUPTED


if __name__ == "__main__":
    command("infra.collect:CollectSettings", entry)
