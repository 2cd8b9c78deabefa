"""`python -m farm.submit`: samples, queues, runs and lands trials. Start reading at `entry`.

More than a million trials are queued only after a question, and none that the disk cannot hold (`require_consent`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from conf.cli.bars import StepBar
from conf.cli.command_line import command
from conf.errors import UsageError
from farm.dispatch.monitoring import Service
from farm.dispatch.submitted_code import record_code, record_submitted
from farm.queue.jobs import Queue, queue_to_read
from farm.queue.queue_values import (
    MIXED_FAMILY,
    Job,
    device_key,
    job_id_for,
    text_of_config,
    text_of_group,
    text_of_settings,
)
from farm.sampling.collocating import SIZES, Groups, pool_of
from farm.sampling.draws import sample_range
from farm.submission.model_check import require_models
from farm.submission.settings import SubmitSettings, require_gpus, require_optimizers, spec_of
from farm.work import follow_hint, work
from featurize.configs.trial import canonical_json
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from workers.devices import choose_device

_RULES_SHOWN = 3
_DRAWN_EVERY = 2000  # trials


def entry(settings: SubmitSettings) -> int:
    """Queue the job and run it; return 130 if interrupted."""
    choice, device_line = choose_device(settings.device)
    settings = dataclasses.replace(settings, device=choice)
    # The first sample also finds a space that has no valid configuration, before anything is written.
    next(_texts(settings, 0, 1))
    for space in settings.spaces:
        require_gpus(space, choice, settings.cluster)
        require_optimizers(space, choice)
    require_models(settings.spaces)
    if not settings.detach:
        settings.cluster.check_address()
    folder = DataFolder.resolve(settings.data)
    if settings.n > ASK_ABOVE:
        texts = list(_texts(settings, 0, EXAMPLES))
        require_consent(folder, settings.n - _queued(folder, settings), texts, settings.yes)
    folder.create()
    with Service.open(folder, settings.log, settings.metrics) as service, Queue.open(folder.queue) as queue:
        job_id = submit(folder, queue, settings, quiet=service.quiet)
        if settings.detach:
            print(f"{job_id}: queued. {follow_hint(folder, job_id)}")
            return 0
        print(device_line + ("; one worker, as cluster=inline has" if settings.cluster.kind == "inline" else ""))
        return work(folder, queue, settings.cluster, job_id=job_id, service=service)


def submit(folder: DataFolder, queue: Queue, settings: SubmitSettings, quiet: bool = True) -> str:
    """Queue the tasks that are not queued yet; return the job's id. The same submission again adds nothing.

    Shows a bar on a terminal where that takes a while, unless `quiet`. Ctrl-C takes out again what was added.
    """
    identity = settings.identity()
    job_id = _job_id(settings)
    job = Job(
        job_id=job_id,
        family=_family(settings),
        space_json=canonical_json(identity["space"]),
        n=settings.n,
        seed=settings.seed,
        policy=settings.policy,
        priority=settings.priority,
        device=device_key(settings.device),
        settings_json=text_of_settings(settings.trial_settings),
        submitted_at=time.time(),
    )
    existing = queue.next_index(job_id)
    rejections: Counter[str] = Counter()
    for space in settings.spaces:
        record_code(space.code_names())  # also of tasks that are queued already
    with StepBar(job_id) as bar:
        shown = None if quiet else functools.partial(bar.update, "forecasting")
        configs = enumerate(_texts(settings, existing, settings.n, rejections, shown), start=existing)
        counted = configs if quiet else _shown(configs, bar, existing, settings.n)
        try:
            added = queue.submit(job, counted, time.time(), on_interrupt=lambda: bar.update("taking back", 0, 0))
        except KeyboardInterrupt:
            print(f"{job_id}: interrupted while it was queued; its trials are taken out again", file=sys.stderr)
            raise
    RunWriter(folder).write_job(
        {
            "job_id": job_id,
            "family": job.family,
            "n": max(settings.n, existing),
            "seed": job.seed,
            "policy": job.policy,
            "priority": job.priority,
            "space": job.space_json,
            "config": json.dumps({**identity, "data": str(folder.root)}, sort_keys=True),
            "submitted_at": queue.job(job_id).submitted_at,
        }
    )
    total = queue.counts(job_id).total
    known = f"{total - added.added} were queued before" if total > added.added else "new"
    for rule, count in rejections.most_common(_RULES_SHOWN):  # a misspelt choice would lose its share in silence
        print(f"{job_id}: {count} sampled points were drawn again: {rule}")
    print(f"{job_id}: {added.added} trials added ({known}), {total} in all")
    return job_id


def _queued(folder: DataFolder, settings: SubmitSettings) -> int:
    """Return how many of the job's trials the queue already holds, so that a repeated command need not ask again."""
    if not folder.queue.is_file():
        return 0
    with queue_to_read(folder.queue) as queue:
        return queue.next_index(_job_id(settings))


def _family(settings: SubmitSettings) -> str:
    families = {space.family for space in settings.spaces}
    return families.pop() if len(families) == 1 else MIXED_FAMILY


def _job_id(settings: SubmitSettings) -> str:
    name = _family(settings) if settings.collocate is None else settings.collocate
    return job_id_for(name, **settings.identity())


def _shown(configs: Iterable[tuple[int, str]], bar: StepBar, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yield the same items and draw a bar every few thousand, so small jobs show none."""
    for done, config in enumerate(configs, start=1):
        yield config
        if done % _DRAWN_EVERY == 0:
            bar.update("queuing", done, stop - start)


def _texts(
    settings: SubmitSettings,
    start: int,
    stop: int,
    rejections: Counter[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Yield the tasks of the indices `start` <= i < `stop` as the queue holds them, after recording their code."""
    if settings.collocate is None:
        sampled = sample_range(
            settings.space,
            settings.seed,
            start,
            stop,
            settings.policy,
            settings.limits,
            rejections,
            settings.batch_sizes,
        )
        yield from map(text_of_config, record_submitted(sampled))
        return
    device = spec_of(settings.device)
    pool = pool_of(
        settings.spaces,
        device,
        seed=settings.seed,
        policy=settings.policy,
        limits=settings.limits,
        progress=progress or (lambda done, of: None),
    )
    on_gpu = settings.device.backend != "cpu"
    memory_mib = device.memory_mib * (settings.device.memory_fraction or 1.0) if on_gpu else None
    groups = Groups(pool, SIZES[settings.collocate], memory_mib, settings.seed)
    for group in itertools.islice(groups, start, stop):
        yield text_of_group(list(record_submitted(group)))


if __name__ == "__main__":
    command("submit", entry)


ASK_ABOVE = 1_000_000  # trials that one command adds
EXAMPLES = 200  # configurations that tell how long the others are
# Of a trial in the queue beside its configuration: 80 to 100 were measured, half-filled pages included.
_BYTES_BESIDE = 90


def require_consent(folder: DataFolder, trials: int, example_texts: Sequence[str], agreed: bool) -> None:
    """Return if so many trials may be queued: they are few, `agreed` to (`yes=true`), or confirmed on the terminal.

    `example_texts` are configurations as the queue holds them. Raises `UsageError` where the disk has no room for all
    of them, where the user says no, and without a terminal, where the message names `yes=true`.
    """
    if trials <= ASK_ABOVE:
        return
    needed_bytes = queue_bytes(trials, example_texts)
    free_bytes = shutil.disk_usage(_existing(folder.root)).free
    asked = (
        f"this queues {trials:,} trials, about {_size(needed_bytes)} in {folder.queue} ({_size(free_bytes)} are free)"
    )
    if needed_bytes > free_bytes:
        raise UsageError(f"{asked}; take a smaller n")
    if agreed:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{asked}; confirm with yes=true")
    print(f"{asked}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was queued")


def queue_bytes(trials: int, example_texts: Iterable[str]) -> int:
    """Estimate the size in bytes of so many trials in the queue's file, from the texts of a few."""
    lengths = [len(text.encode()) for text in example_texts]
    return round(trials * (sum(lengths) / max(1, len(lengths)) + _BYTES_BESIDE))


def _existing(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _size(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
