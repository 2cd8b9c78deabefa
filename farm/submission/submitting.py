"""Submissions: the settings of commands that run trials, the checks of these, and the queueing of trials.

Start reading at `SubmitSettings`, whose fields `conf.cli.settings` turns into keys, and at `submit`. `with_layouts`
spreads trials over GPUs; `require_gpus` and `require_optimizers` refuse what a device cannot run. `require_consent`
asks above a million trials, and refuses what the disk cannot hold.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conf.cli.command_line import StepBar
from conf.cli.settings import Checked, data_key, group, key, keys_of, section
from conf.errors import EnvironmentProblem, UsageError, require_known
from conf.files.identity import version_of
from farm.dispatch.monitoring import LogSettings, MetricsSettings
from farm.dispatch.ray_cluster import ClusterSettings, gpu_problem
from farm.dispatch.submitted_code import record_code, record_submitted
from farm.queue.jobs import (
    MIXED_FAMILY,
    Job,
    Queue,
    device_key,
    queue_to_read,
    text_of_settings,
    text_of_task,
)
from farm.sampling.forecast import POOL, SIZES, Groups, pool_of
from featurize.configs.space import (
    POLICIES,
    SAMPLER_VERSION,
    Choice,
    Constant,
    Dimension,
    Limits,
    Space,
    checked_batch_sizes,
    default_space,
    parse_space,
    require_within_limits,
    sample_range,
    space_of_mapping,
)
from featurize.configs.trial import canonical_json
from featurize.families import family_names
from featurize.job.layout import WRAPPED, parse_parallel
from featurize.job.training_settings import OPTIMIZERS
from featurize.operators.torch_releases import require_torch, require_traceable
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from workers.devices import (
    SHARING,
    DeviceChoice,
    KernelSettings,
    Slot,
    TrialRules,
    TrialSettings,
    WindowSettings,
    make_device,
)
from workers.telemetry.sensors import TelemetrySettings

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class DeviceKeys(DeviceChoice):
    """The keys of the files of `conf/device/` that choose a backend."""

    model: str | None = key(None, "the simulated GPU model, by its description in this folder")


def device_choice(values: Mapping[str, Any]) -> DeviceChoice:
    """Return the device that a file of `conf/device/` chooses: a backend, or a description, which is simulated.

    Raises:
        UsageError: Unknown keys, and values that no device has.
    """
    from featurize.device.device_spec import device_from_mapping, load_device

    values = dict(values)
    if "backend" not in values:
        return DeviceChoice(
            backend="simulated", count=values.pop("count", None), spec=_describe(device_from_mapping(values))
        )
    require_known("device", sorted(values), [key.name for key in keys_of(DeviceKeys)])
    model = values.pop("model", None)
    return DeviceChoice(**values, spec=None if model is None else _describe(load_device(str(model))))


def _describe(spec: DeviceSpec) -> dict[str, Any]:
    """Return a description as JSON, with its interconnect only if it differs from the GPU model's."""
    from featurize.device.device_spec import device_from_mapping

    mapping = spec.to_mapping()
    if spec.interconnect == device_from_mapping(mapping).interconnect:
        return mapping
    return {**mapping, "interconnect": None if spec.interconnect is None else asdict(spec.interconnect)}


def space_within_limits(values: Mapping[str, Any]) -> Space:
    """Return the search space of a file of `conf/arch/`. Raises `UsageError`, also beyond the family's limits."""
    space = space_of_mapping(values)
    require_within_limits(space)
    return space


@dataclass(frozen=True, kw_only=True)
class TrialsSettings(Checked):
    """The devices of trials, and how they run. `device` may still be `auto`; `choose_device` resolves it."""

    device: DeviceChoice = group(
        "auto", "device that trials run on; a device description is simulated", device_choice, DeviceKeys
    )
    cluster: ClusterSettings = group("local", "where the workers live", schema=ClusterSettings)
    window: WindowSettings = group("adaptive", "length of a run's measurement", schema=WindowSettings)
    data: str | None = data_key()
    limits: Limits = section(Limits)
    trial: TrialRules = section(TrialRules)
    telemetry: TelemetrySettings = section(TelemetrySettings)
    kernels: KernelSettings = section(KernelSettings)

    @property
    def trial_settings(self) -> TrialSettings:
        """The settings of trials that a worker needs."""
        return TrialSettings(window=self.window, telemetry=self.telemetry, kernels=self.kernels, **vars(self.trial))


@dataclass(frozen=True, kw_only=True)
class SampledSettings(TrialsSettings):
    """The space that is sampled, and how."""

    arch: Space | None = group(None, "", space_within_limits, added=True)
    seed: int = key(0, "seed that, with the space, determines every configuration", "int >= 0")
    policy: str = key("stratified", "stratified fills every range evenly for any n", choices=tuple(POLICIES))


@dataclass(frozen=True, kw_only=True)
class SubmitSettings(SampledSettings):
    """One submission.

    usage: python -m farm.submit +arch=FAMILY n=N [KEY=VALUE ...]      FAMILY: {arch}

      python -m farm.submit +arch=cnn n=5000                      on the GPUs here, or on four simulated ones
      python -m farm.submit +arch=mlp n=200 device=cpu            really train on the CPU
      python -m farm.submit +arch=cnn n=64 device=H200-SXM-141GB  simulate a GPU by its description
      python -m farm.submit +arch=cnn n=500 arch.space.batch_size=[8,16,32] arch.space.optimizer=[adam,sgd]
      python -m farm.submit +arch=cnn n=5000 detach=true          only queue; `python -m farm.work` runs it
      python -m farm.submit +collocate=pairs arch=[cnn,gpt] n=500    pairs of trials that share a GPU

    arch.space.NAME replaces a dimension of the search space: with a number, a list (a value listed twice is twice as
    likely) or a range, as in "arch.space.depth={low: 4, high: 12, scale: log, step: 2}"; arch.space.depth.high=20
    changes one end. A number beyond the family's limits is refused.

    The same command again adds nothing and continues where it was; a larger n adds the difference. Ctrl-C once finishes
    running trials and exits, twice stops immediately; no run is lost either way. While trials are being queued, Ctrl-C
    removes them again. Above a million trials it prints the disk space needed and asks; without a terminal, pass
    yes=true.
    """

    SPELLINGS: ClassVar = {"arch[": "families", "+collocate": "collocate"}

    n: int = key(help="number of trials", kind="int 1 to 10000000")
    parallel: Any = key(
        None,
        "several GPUs for each trial, one process each: ddp=2, or '{ddp: 2, static_graph: true}'; a list samples it, "
        'as in "[null,{ddp: 2}]"; docs/parallel.md has the settings',
        "list | mapping | text | null",
    )
    batch_sizes: tuple[int, ...] | None = key(
        None,
        "batch sizes, as in [8,32,128]: every sampled trial runs at each of them; n counts the trials",
        build=checked_batch_sizes,
    )
    collocate: str | None = key(
        None,
        "groups of trials that start together on one device, after each has run alone; n counts them",
        choices=tuple(SIZES),
    )
    families: tuple[str, ...] | None = key(
        None,
        "with collocate: families to draw trials from; arch=[cnn,gpt] means the same",
        "text | list of text | null",
        family_names(),
    )
    sharing: str = key("time_slicing", "with collocate: how trials share a GPU", choices=SHARING)
    priority: int = key(0, "jobs of higher priority run first")
    detach: bool = key(False, "true: queue the job and return")
    yes: bool = key(False, "true: queue more than a million trials without being asked")
    log: LogSettings = section(LogSettings)
    metrics: MetricsSettings = section(MetricsSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel is not None and self.arch is not None:
            object.__setattr__(self, "arch", with_layouts(self.arch, self.parallel))

    def problems(self) -> Iterator[str]:
        if self.collocate is None:
            given = [("families", self.families is not None), ("sharing", self.sharing != SHARING[0])]
            yield from (f"{name} goes with collocate=pairs" for name, present in given if present)
        else:
            together = [
                ("batch_sizes", self.batch_sizes is not None),
                ("parallel", self.parallel is not None),
                ("kernels.steps", self.kernels.steps > 0),
            ]
            yield from (f"{name} does not go with collocate" for name, present in together if present)
            if self.sharing == "mps" and self.device.backend == "cpu":
                yield "sharing=mps is of NVIDIA GPUs; trials on the CPU share its cores"
        if self.families is not None:
            if self.arch is not None:
                yield "give +arch=FAMILY or arch=[A,B], not both"
            if not self.families or len(set(self.families)) < len(self.families):
                yield f"families must name some of these, each once: {', '.join(family_names())}"
        elif self.arch is None:
            yield f"which family? add one of {', '.join(f'+arch={name}' for name in family_names())}"

    @property
    def spaces(self) -> tuple[Space, ...]:
        """Return the search spaces: one, or with `families` one for each."""
        if self.arch is not None:
            return (self.arch,)
        return tuple(parse_space(name, default_space(name) or {}) for name in self.families or ())

    @property
    def trial_settings(self) -> TrialSettings:
        """The settings of trials that a worker needs."""
        return replace(super().trial_settings, sharing=self.sharing)

    def identity(self) -> dict[str, Any]:
        """Return the submission's identity: everything that determines its runs, without n and priority."""
        # Absent without batch sizes: jobs older than the key keep their ids.
        pairs = {} if self.batch_sizes is None else {"batch_sizes": list(self.batch_sizes)}
        space = (
            self.spaces[0].to_mapping()
            if self.collocate is None
            else {
                "together": SIZES[self.collocate],
                "pool": POOL,
                "spaces": [space.to_mapping() for space in self.spaces],
            }
        )
        return {
            "space": space,
            "seed": self.seed,
            "policy": self.policy,
            "limits": self.limits.to_mapping(),
            "settings": {"device": self.device.to_mapping(), "trial": self.trial_settings.to_mapping(), **pairs},
        }


DIMENSION = "parallel"


def with_layouts(space: Space, given: Any) -> Space:
    """Return the space with its dimension `parallel` replaced by `given`.

    Args:
        given: A layout as `parse_parallel` takes it, or a list of them; None is one GPU.

    Raises:
        UsageError: An invalid layout.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str)
    layouts = [parse_parallel(text) for text in (given if several else [given])]
    if not layouts:
        raise UsageError("parallel: the list of layouts is empty")
    texts = tuple(None if layout is None else layout.text() for layout in layouts)
    dimension: Dimension = Choice(DIMENSION, texts) if several else Constant(DIMENSION, texts[0])
    others = tuple(other for other in space.dimensions if other.name != DIMENSION)
    # A space without the dimension means one GPU; its jobs keep their ids.
    return replace(space, dimensions=others if texts == (None,) else (*others, dimension))


def require_gpus(space: Space, choice: DeviceChoice, cluster: ClusterSettings) -> None:
    """Refuse a layout that the device cannot run.

    Args:
        choice: The device. There are as many simulated GPUs as a layout needs.
        cluster: The cluster. GPUs of this machine are counted, those of a joined cluster are not known yet.

    Raises:
        UsageError: A pipeline on real GPUs, several nodes, or more GPUs than there are.
        EnvironmentProblem: The installed torch is too old for its trace, or for FSDP2 on the CPU.
    """
    layouts = [layout for value in space.choices(DIMENSION) if (layout := parse_parallel(value)) is not None]
    if choice.backend == "simulated" or not layouts:
        for layout in layouts:
            require_traceable(layout)
        return
    for layout in layouts:
        if not_run := [mode for mode in layout.modes if mode not in WRAPPED]:
            raise UsageError(
                f"parallel={layout.text()}: {', '.join(not_run)} does not run on real devices yet; modes that do: "
                f"{', '.join(WRAPPED)}; simulate it with device=A100-SXM4-40GB"
            )
        if layout.degrees.fsdp > 1 and choice.backend == "cpu":
            require_torch("2.8", "parallel: fsdp with device=cpu")
        if layout.replicates and layout.degrees.tp > 1:
            raise UsageError(
                f"parallel={layout.text()}: on real devices ddp with tp needs fsdp, as in ddp=2,fsdp=4,tp=2; simulate "
                "it with device=A100-SXM4-40GB"
            )
        if layout.zero.stage:
            raise UsageError(
                f"parallel={layout.text()}: real ranks do not run DeepSpeed; simulate it with device=A100-SXM4-40GB"
            )
        if layout.nodes > 1:
            raise UsageError(
                f"parallel={layout.text()}: {layout.ranks} ranks fill {layout.nodes} nodes of "
                f"{layout.cluster.gpus_per_node}, and a trial runs on one; set gpus_per_node, or simulate it with "
                "device=A100-SXM4-40GB"
            )
    if choice.backend == "cuda" and cluster.address is None:
        gpus = 1 if cluster.kind == "inline" else len(make_device(choice).slots())
        if (problem := gpu_problem(max(layouts, key=lambda layout: layout.ranks), gpus)) is not None:
            raise UsageError(problem)


def require_optimizers(space: Space, choice: DeviceChoice) -> None:
    """Raise for optimizers that the device cannot run.

    Raises:
        UsageError: They run only on CUDA, and trials run on the CPU.
        EnvironmentProblem: Their package is missing. A simulated GPU needs no package for CUDA optimizers.
    """
    for name in space.choices("optimizer"):
        optimizer = OPTIMIZERS[str(name)]
        if optimizer.cuda_only and choice.backend == "cpu":
            choices = ", ".join(known for known, other in OPTIMIZERS.items() if not other.cuda_only)
            raise UsageError(f"optimizer={name} runs on CUDA only; with device=cpu choose among {choices}")
        if optimizer.package is None or (optimizer.cuda_only and choice.backend == "simulated"):
            continue
        if version_of(optimizer.package) is None:
            raise EnvironmentProblem(f"optimizer={name} needs {optimizer.package}: pip install {optimizer.package}")


def spec_of(choice: DeviceChoice, slot: Slot | None = None) -> DeviceSpec:
    """Return the description of the device that trials run on, for forecasts.

    The CPU and models without a description get the rates of `DEFAULT_DEVICE`. `slot`: a slot of the device; None: the
    first one. Raises `DeviceUnavailable` if the device cannot be used here.
    """
    from featurize.device.device_spec import DEFAULT_DEVICE, device_from_mapping, known_device, load_device

    if choice.backend == "simulated" and choice.spec is not None:
        return device_from_mapping(dict(choice.spec))
    slot = slot or make_device(choice).slots()[0]
    known = known_device(slot.device_name)
    if known is not None:
        return load_device(known)
    stands_in = load_device(DEFAULT_DEVICE)
    return replace(stands_in, name=slot.device_name, memory_mib=slot.device_memory_mib or stands_in.memory_mib)


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
            added = queue.submit(job, counted, on_interrupt=lambda: bar.update("taking back", 0, 0))
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


def _family(settings: SubmitSettings) -> str:
    families = {space.family for space in settings.spaces}
    return families.pop() if len(families) == 1 else MIXED_FAMILY


def job_id_for(
    family: str,
    space: Mapping[str, Any],
    seed: int,
    policy: str,
    limits: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> str:
    """Return a submission's id, such as `cnn-3f2a9c1b`, which does not depend on n and priority.

    `space` is `Space.to_mapping()`, `limits` is `Limits.to_mapping()`, all of them JSON-serialisable.
    """
    text = canonical_json([SAMPLER_VERSION, family, space, seed, policy, limits, settings])
    return f"{family}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


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
    for members in itertools.islice(groups, start, stop):
        yield text_of_task(*record_submitted(members))


def require_consent(folder: DataFolder, settings: SubmitSettings) -> None:
    """Return if the submission may be queued: it adds few trials, or many with `yes=true` or the user's consent.

    Raises `UsageError` if the disk has no room for them, if the user declines on the terminal, and without a terminal;
    the message then names `yes=true`.
    """
    trials = settings.n
    if trials > ASK_ABOVE and folder.queue.is_file():  # a repeated command does not ask about queued ones again
        with queue_to_read(folder.queue) as queue:
            trials -= queue.next_index(_job_id(settings))
    if trials <= ASK_ABOVE:
        return
    lengths = [len(text.encode()) for text in task_texts(settings, 0, _EXAMPLES)]
    needed_bytes = round(trials * (sum(lengths) / max(1, len(lengths)) + _BYTES_BESIDE))
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


def existing_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _size(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
