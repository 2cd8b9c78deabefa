"""`python -m farm.submit`: samples, queues, runs and lands trials. Start reading at `entry`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from conf.cli.command_line import StepBar, command
from farm.dispatch.layouts import require_gpus, require_optimizers
from farm.dispatch.submitted_code import record_code, record_submitted
from farm.monitoring.service import Service
from farm.queue.jobs import MIXED_FAMILY, Job, Queue, job_id_for
from farm.queue.queue_copy import queue_to_read
from farm.queue.queue_values import device_key, text_of_config, text_of_group, text_of_settings
from farm.sampling.collocating import SIZES, Groups, pool_of
from farm.sampling.draws import sample_range
from farm.submission.described_device import spec_of
from farm.submission.large_submissions import ASK_ABOVE, EXAMPLES, require_consent
from farm.submission.model_check import require_models
from farm.submission.settings import SubmitSettings
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
