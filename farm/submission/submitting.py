"""Queues the trials of a submission, and asks for consent above a million of them.

Start reading at `submit`. `require_consent` also refuses what the disk cannot hold.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from conf.cli.command_line import StepBar
from conf.errors import UsageError
from farm.dispatch.submitted_code import record_code, record_submitted
from farm.queue.jobs import Queue, queue_to_read
from farm.queue.queue_values import (
    MIXED_FAMILY,
    Job,
    device_key,
    job_id_for,
    text_of_settings,
    text_of_task,
)
from farm.sampling.forecast import SIZES, Groups, pool_of
from farm.submission.settings import SubmitSettings, spec_of
from featurize.configs.draws import sample_range
from featurize.configs.trial import canonical_json
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

ASK_ABOVE = 1_000_000  # trials that one command adds
_EXAMPLES = 200  # configurations whose length stands for all
# Bytes of a queued trial beside its configuration: 80 to 100 were measured, half-filled pages included.
_BYTES_BESIDE = 90
_RULES_SHOWN = 3
_DRAWN_EVERY = 2000  # trials


def submit(folder: DataFolder, queue: Queue, settings: SubmitSettings, quiet: bool = True) -> str:
    """Queue the tasks that are not queued yet; return the job's id. The same submission again adds nothing.

    Shows a bar on a terminal if that takes a while, unless `quiet`. Ctrl-C removes the added tasks again.
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
        record_code(space.code_names())  # including tasks that are queued already
    with StepBar(job_id) as bar:
        shown = None if quiet else functools.partial(bar.update, "forecasting")
        configs = enumerate(task_texts(settings, existing, settings.n, rejections, shown), start=existing)
        counted = configs if quiet else _show_progress(configs, bar, existing, settings.n)
        try:
            added = queue.submit(job, counted, time.time(), on_interrupt=lambda: bar.update("taking back", 0, 0))
        except KeyboardInterrupt:
            print(
                f"{job_id}: interrupted while it was queued; its trials are taken out again",
                file=sys.stderr,
            )
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
    origin = f"{total - added} were queued before" if total > added else "new"
    for rule, count in rejections.most_common(_RULES_SHOWN):  # else a misspelt choice would silently lose its share
        print(f"{job_id}: {count} sampled points were drawn again: {rule}")
    print(f"{job_id}: {added} trials added ({origin}), {total} in all")
    return job_id


def _count_queued(folder: DataFolder, settings: SubmitSettings) -> int:
    """Return how many of the job's trials are queued already: a repeated command does not ask about them again."""
    if not folder.queue.is_file():
        return 0
    with queue_to_read(folder.queue) as queue:
        return queue.next_index(_job_id(settings))


def _family(settings: SubmitSettings) -> str:
    families = {space.family for space in settings.spaces}
    return families.pop() if len(families) == 1 else MIXED_FAMILY


def _job_id(settings: SubmitSettings) -> str:
    return job_id_for(settings.collocate or _family(settings), **settings.identity())


def _show_progress(
    configs: Iterable[tuple[int, str]], bar: StepBar, start: int, stop: int
) -> Iterator[tuple[int, str]]:
    """Yield the same items and update the bar every few thousand, so small jobs show none."""
    for completed, config in enumerate(configs, start=1):
        yield config
        if completed % _DRAWN_EVERY == 0:
            bar.update("queuing", completed, stop - start)


def task_texts(
    settings: SubmitSettings,
    start: int,
    stop: int,
    rejections: Counter[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Yield the tasks of the indices `start` <= i < `stop` as the queue holds them, after recording their code."""
    if settings.collocate is None:
        sampled = sample_range(
            settings.spaces[0],
            settings.seed,
            start,
            stop,
            settings.policy,
            settings.limits,
            rejections,
            settings.batch_sizes,
        )
        yield from map(text_of_task, record_submitted(sampled))
        return
    device = spec_of(settings.device)
    pool = pool_of(
        settings.spaces,
        device,
        seed=settings.seed,
        policy=settings.policy,
        limits=settings.limits,
        progress=progress or (lambda completed, total: None),
    )
    on_gpu = settings.device.backend != "cpu"
    memory_mib = device.memory_mib * (settings.device.memory_fraction or 1.0) if on_gpu else None
    groups = Groups(pool, SIZES[settings.collocate], memory_mib, settings.seed)
    for group in itertools.islice(groups, start, stop):
        yield text_of_task(*record_submitted(group))


def require_consent(folder: DataFolder, settings: SubmitSettings) -> None:
    """Return if the submission may be queued: it adds few trials, or many with `yes=true` or the user's consent.

    Raises `UsageError` if the disk has no room for them, if the user declines on the terminal, and without a terminal;
    the message then names `yes=true`.
    """
    if settings.n <= ASK_ABOVE or (trials := settings.n - _count_queued(folder, settings)) <= ASK_ABOVE:
        return
    needed_bytes = queue_bytes(trials, task_texts(settings, 0, _EXAMPLES))
    free_bytes = shutil.disk_usage(existing_folder(folder.root)).free
    asked = (
        f"this queues {trials:,} trials, about {_size(needed_bytes)} in {folder.queue} ({_size(free_bytes)} are free)"
    )
    if needed_bytes > free_bytes:
        raise UsageError(f"{asked}; take a smaller n")
    if settings.yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{asked}; confirm with yes=true")
    print(f"{asked}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was queued")


def queue_bytes(trials: int, example_texts: Iterable[str]) -> int:
    """Estimate the size in bytes of `trials` trials in the queue's file, from the texts of a few."""
    lengths = [len(text.encode()) for text in example_texts]
    return round(trials * (sum(lengths) / max(1, len(lengths)) + _BYTES_BESIDE))


def existing_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _size(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
