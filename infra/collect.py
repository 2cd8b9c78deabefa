"""`make collect-gpu`: measure runs of every family on a GPU that is lent for a while, and add them to the data set.

Start reading at `collect`. `python -m infra.collect minutes=9`: the same command goes on where it was, and every family
gets its turn in each round, so that an early end leaves some of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from conf.arguments import exit_code, keyed_values
from conf.cli import EXIT_USAGE, load_config
from conf.errors import CommandError, UsageError, unknown_name
from conf.overrides import load_settings
from farm.jobs import Queue
from farm.settings import SubmitSettings
from farm.space import Choice, Range, Space, space_of_mapping
from farm.submit import submit
from farm.work import work
from featurize.families import family_names
from featurize.trial import OPTIMIZERS, PRECISIONS
from warehouse.export import ExportSettings, export
from warehouse.folder import DataFolder
from workers.devices import DeviceUnavailable, choose_device

# Sampled where a family's space leaves them constant.
TRAINING = {
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "activation_checkpointing": (False, True),
    "cudnn_benchmark": (False, True),
    "channels_last": (False, True),
}
PAIRS = "pairs"
# What a family's trials are made of: share of them by the share of the card's memory that they are allowed; `pairs` run
# each trial at several batch sizes on the whole card.
SHARES: dict[float | str, float] = {1.0: 0.7, 0.5: 0.1, 0.25: 0.1, PAIRS: 0.1}
_PAIR_SIZES = 4
_FIRST_ROUND, _ROUND = 2, 10  # trials of each family: within a round, families come one after another
_LEAVE_S = 75.0  # before the end: what runs is finished, and the data set written
_ON_CPU = ("limits.max_memory_mib=400", "limits.max_parameters=5000000", "window.max_seconds=2")
_EXPORTED = {"cuda": "measured", "cpu": "cpu", "simulated": "simulated"}


# What each key may hold, as `conf.values` spells it.
KINDS = {
    "families": "text | list of text", "n": "int 1 to 10000000", "seed": "int >= 0", "device": "text",
    "minutes": "number 0 to 1e6 | null", "cluster": "text", "timeout_s": "number 1 to 1e7", "data": "new path",
    "out": "new path | null", "max_mb": "number > 0", "overrides": "text | list of text",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """The keys. `n`: trials of each family; `minutes` None: until all are done; another `seed` gives other trials."""

    families: Sequence[str] = ()
    n: int = 420
    seed: int = 0
    device: str = "cuda"
    minutes: float | None = None
    cluster: str = "inline"  # one GPU; local: all of this machine's, by Ray
    timeout_s: float = 120
    data: str = "data/collect"
    out: str | None = None
    max_mb: float = 20
    overrides: Sequence[str] = ()  # of farm.submit, for every job

    def __post_init__(self) -> None:
        for name in ("families", "overrides"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in self.families:
            if name not in family_names():
                raise unknown_name("family", name, family_names())
        if self.device not in _EXPORTED:
            raise unknown_name("device", self.device, _EXPORTED)
        if self.device != "cuda" and self.out is None:
            raise UsageError("out=... is missing: only what a GPU measured goes into datasets/")
        for name, floor in (("n", 1), ("seed", 0), ("minutes", 0), ("timeout_s", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < floor):
                raise UsageError(f"{name} must be a number >= {floor}, got {value!r}")


def settings_of(argv: Sequence[str]) -> CollectSettings:
    """KEY=VALUE arguments as settings. Raises `UsageError`."""
    return CollectSettings(**keyed_values(argv, KINDS))


def jobs_of(family: str, settings: CollectSettings) -> dict[float | str, SubmitSettings]:
    """The family's submissions, by what they are a share of: the whole space, with every training setting sampled."""
    plain = load_config("submit", [f"+arch={family}", "n=1"])
    space = plain.arch.space
    sampled = []
    for name, choices in TRAINING.items():
        if name not in space or not hasattr(space[name], "__iter__") or isinstance(space[name], str):
            choices_text = ",".join(str(choice).lower() for choice in choices)
            sampled.append(f"{'' if name in space else '+'}arch.space.{name}=[{choices_text}]")
    common = [
        f"+arch={family}", "n=1", f"device={settings.device}", f"cluster={settings.cluster}",
        f"trial.timeout_s={settings.timeout_s}", *sampled,
        *(_ON_CPU if settings.device == "cpu" else ()), *settings.overrides,
    ]  # fmt: skip
    submissions = {}
    for offset, share in enumerate(SHARES):
        own = [f"seed={settings.seed * len(SHARES) + offset}"]
        if share == PAIRS:
            own.append(f"batch_sizes=[{','.join(map(str, pair_sizes(space_of_mapping(_plain(plain.arch)))))}]")
        elif share != 1.0:
            if settings.device == "cpu":
                continue
            own.append(f"device.memory_fraction={share}")
        submission = load_settings(SubmitSettings, "submit", [*common, *own])
        choice, _ = choose_device(submission.device)
        submissions[share] = dataclasses.replace(submission, device=choice)
    return submissions


def _plain(node):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=True)


def pair_sizes(space: Space) -> tuple[int, ...]:
    """Batch sizes over the range that a space samples, each a factor from the next."""
    (dimension,) = (dimension for dimension in space.dimensions if dimension.name == "batch_size")
    if isinstance(dimension, Range):
        low, high = dimension.low, dimension.high
    elif isinstance(dimension, Choice):
        low, high = min(dimension.choices), max(dimension.choices)
    else:
        low, high = max(1, dimension.fixed // 4), dimension.fixed * 2
    steps = range(_PAIR_SIZES)
    return tuple(sorted({round(low * (high / low) ** (i / (_PAIR_SIZES - 1))) for i in steps}))


def rounds(n: int) -> Iterator[int]:
    """How many trials of a family there are by the end of each round."""
    yield from (total for total in (_FIRST_ROUND, *range(_ROUND, n, _ROUND)) if total < n)
    yield n


def collect(settings: CollectSettings, say: Callable[[str], None] = print) -> bool:
    """Queue and run round after round until all is done or the time is up, then export; whether all is done.

    A family whose space cannot be sampled here is told and left out. Raises `UsageError` where the device is not here.
    """
    until_s = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes - _LEAVE_S
    jobs = {family: jobs_of(family, settings) for family in settings.families or family_names()}
    folder = DataFolder.resolve(settings.data).create()
    done = True
    with Queue.open(folder.queue) as queue:
        for total in rounds(settings.n):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                done = False
                break
            for family in list(jobs):
                if not _queue_family(folder, queue, jobs[family], total, say):
                    del jobs[family]
            if not jobs:
                raise UsageError("no family is left to measure")
            say(f"round of {total} trials of each of {len(jobs)} families: {queue.pending()} to run")
            cluster = next(iter(jobs.values()))[1.0].cluster
            work(folder, queue, cluster, seconds=None if left_s == math.inf else left_s)
            if queue.pending():
                done = False
                break
    counts = _counts(folder)
    if not counts:
        say("nothing has been measured yet; the same command goes on")
        return False
    say("\n".join(counts))
    out = ExportSettings(
        out=settings.out, data=settings.data, source=_EXPORTED[settings.device], max_mb=settings.max_mb
    )
    say("\n".join(export(out).lines()))
    say("all trials are done" if done else "the time is up; the same command goes on where it was")
    return done


def _queue_family(folder, queue, jobs: dict[float | str, SubmitSettings], total: int, say) -> bool:
    for share, submission in jobs.items():
        wanted = math.ceil(SHARES[share] * total)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                submit(folder, queue, dataclasses.replace(submission, n=wanted))
        except CommandError as error:
            say(f"{submission.space.family} is left out: {error}")
            return False
    return True


def _counts(folder: DataFolder) -> list[str]:
    from warehouse import connect

    with contextlib.closing(connect(folder)) as connection:
        rows = connection.execute(
            "SELECT family, count(*), list(status ORDER BY status) FROM runs GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    lines = []
    for family, count, statuses in rows:
        status_counts = ", ".join(f"{status} {statuses.count(status)}" for status in dict.fromkeys(statuses))
        lines.append(f"{family}: {count} runs ({status_counts})")
    return lines


def main(argv: Sequence[str]) -> int:
    try:
        return exit_code(lambda: collect(settings_of(argv)))
    except DeviceUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
