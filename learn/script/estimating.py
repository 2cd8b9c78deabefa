"""The call `learn.estimate_script`: a training script's memory, activity and time on a GPU, from a run without one.

Start reading at `estimate_script`; `learn.script.child` runs the script.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from conf.children.running import MEMORY, TIME, local_server
from conf.errors import UsageError, one_line, require_one_of, shown
from featurize.job.layout import Parallel, named_settings, names_network_only
from featurize.job.training_settings import Training
from featurize.memory.cudnn_workspaces import search_settings
from featurize.timing.collectives import fabric_of
from featurize.trace.trace_cache import BadRecord
from learn.estimation.answers import answer_and_write
from learn.estimation.bounds import RUNS, KnownRun
from learn.estimation.estimate_view import INFO, WARNING, Note
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import Request, ScriptKeywords, StepFiles, platform_and_options
from learn.job.training_job import TrainingJob
from learn.script import records
from learn.script.command_line import ScriptCommand, parse_command
from learn.script.records import ScriptRecord, read_record

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.recording.step_trace import StepTrace

TIME_LIMIT_S = 600.0
ESTIMATORS = ("trace", "hybrid", "gnn")  # estimators that answer from a recorded step alone
_MEMORY_SHARE = 0.75  # share of this machine's memory that a script may take by default


@dataclass(frozen=True, kw_only=True)
class ScriptSettings(Training):
    """The training settings that a script was observed to choose. It runs with them, so none is refused: neither an
    optimizer that the project does not know, nor a combination."""

    def __post_init__(self) -> None: ...


def estimate_script(
    command: Sequence[str],
    *,
    parallel: Parallel | Mapping[str, Any] | str | None = None,
    report: str | os.PathLike[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    name: str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_gib: float | None = None,
    show_output: bool = False,
    **options: Unpack[ScriptKeywords],
) -> Estimate:
    """Estimate the memory (MiB), GPU activity (0 to 1) and step time (ms) of an unmodified training script.

    Runs the script in a child process, on this machine's CPU, until two optimizer steps are done. The script sees one
    GPU of the requested model; every tensor on it lies on the meta device. Data is loaded for real. Files that the
    script saves go to a folder that is removed. Experiment loggers and network connections are switched off.

    The script runs as this user, with this user's rights: estimate only scripts that you would run.

    Args:
        command: `["python", "train.py", ...]` or `["python", "-m", "package.train", ...]`, or a launcher's, such as
            `["torchrun", "--nproc-per-node", "8", "train.py", ...]`, whose rank 0 is estimated. It runs in the
            working folder, with this process's Python. `env NAME=VALUE` and `-u NAME` may precede it.
        parallel: For a launched script, `{"network_gb_s": 50}`: each GPU's share of the network between nodes.
        report, snapshot: Files to write, as in `learn.estimate`.
        name: The job's name in the report.
        time_limit_s: Seconds after which the script is ended, with all processes that it started.
        memory_limit_gib: Memory of the host that these processes may take together, in GiB; None: three quarters of the
            machine's.
        show_output: Whether the script's output goes to standard error.
        **options: As in `learn.estimate`: device, power_limit_w, allocator, machine, workspaces (`"cudnn"` uses the
            script's own settings), torch_version, data, coverage; estimator: trace, hybrid or gnn, which read a
            recorded step; loop, for utilization and step time, as memory is always the script's own loop's; known:
            measured runs of this script, each at its batch size here.

    Returns:
        The estimate, with a note for each suppressed action.

    Raises:
        UsageError: The script cannot be followed; the message names its file and line.
        EnvironmentProblem: No child process, or no temporary folder, can be made.

    Example:
        >>> estimate_script(["python", "train.py", "--batch", "64"], device="A100-SXM4-40GB").peak_memory_mib
    """
    parsed = parse_command(command)
    for keyword in options:
        require_one_of("keyword", keyword, ScriptKeywords.__annotations__)
    if (estimator := options.get("estimator")) not in (None, *ESTIMATORS):
        raise UsageError(f"a script is estimated by {', '.join(ESTIMATORS)}, got estimator={estimator!r}")
    if options.get("known") == RUNS:
        raise UsageError("known=runs is for trial configs; for a script give its measured runs")
    platform, answer_options = platform_and_options(options)
    network, device = _network_of(parallel), platform.device
    if (layout := parsed.layout()).degrees.own > 1:
        fabric_of(device, layout)  # raises for a GPU model whose interconnect is not known
    files, key = StepFiles.check(report, snapshot), records.key_of(parsed, device)
    began_ns = time.monotonic_ns()

    def run() -> ScriptRecord:
        return _record(parsed, device, key, time_limit_s, memory_limit_gib, show_output)

    record = (None if show_output else records.find(key)) or run()
    job = _job(record, name or parsed.name, lambda: (records.with_trace(record) or run()).trace)
    _require_batch_of_script(answer_options.known, job.batch_size)
    if record.parallel is None and network:
        raise UsageError("parallel: the script runs on one GPU; start it with torchrun, or leave parallel out")
    job = replace(job, parallel=record.parallel and record.parallel.changed(**network))
    return answer_and_write(
        Request(job=job, platform=platform, options=answer_options), files, began_ns, _notes(record)
    )


def _network_of(parallel: object) -> dict[str, Any]:
    """Return the layout's settings that the script does not decide. Raises `UsageError` for other settings."""
    if parallel is None:
        return {}
    if not names_network_only(parallel):
        given_text = parallel.text() if isinstance(parallel, Parallel) else shown(parallel)
        raise UsageError(
            "a script's launcher says how it is spread; of parallel= it takes network_gb_s, as in network_gb_s=50, got "
            f"{given_text}"
        )
    assert isinstance(parallel, str | Mapping)
    given = named_settings(parallel)
    Parallel(**given)
    return given


def _require_batch_of_script(runs: Sequence[KnownRun], batch_size: int) -> None:
    """Raise `UsageError` for a measured run at a batch size other than the recorded one."""
    for place, run in enumerate(runs):
        if run.batch_size != batch_size:
            raise UsageError(
                f"known[{place}] is of batch_size={run.batch_size}, and the script trains with {batch_size} samples in "
                "a forward pass; only runs at the script's own batch size count"
            )


def _record(
    command: ScriptCommand,
    spec: DeviceSpec,
    key: str,
    time_limit_s: float,
    memory_limit_gib: float | None,
    show_output: bool,
) -> ScriptRecord:
    """Run the script, read its record, and store it. Raises `UsageError` where it did not reach two steps."""
    began_ns = time.time_ns()
    if memory_limit_gib is None:
        memory_limit_gib = _MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with local_server("", command.environment, has_folder=True) as server:
        folder = server.folder
        request_path = folder / "request.json"
        request = {
            "command": asdict(replace(command, environment={})),
            "device": spec.to_mapping(),
            "folder": str(folder),
        }
        request_path.write_text(json.dumps(request), encoding="utf-8")
        ended = server.start(
            "learn.script.child:main",
            str(request_path),
            time_limit_s=time_limit_s,
            memory_limit_bytes=int(memory_limit_gib * 2**30),
            keeps_output=not show_output,
        ).wait()
        try:
            record = read_record(folder)
        except BadRecord as error:
            raise UsageError(f"{command.name} left a record that cannot be read: {error}") from error
        if record is None:
            limits = {
                TIME: f"has not done two optimizer steps in {time_limit_s:g} s (time_limit_s= sets the limit)",
                MEMORY: f"takes more than {memory_limit_gib:,.1f} GiB of this machine's memory (memory_limit_gib= sets "
                "the limit)",
                None: f"ended its process with code {ended.code} before two optimizer steps were done",
            }
            lines = [one_line(line.strip()) for line in ended.output.splitlines() if line.strip()]
            output = f"; its output ends: {' | '.join(lines[-3:])}" if lines else ""
            raise UsageError(f"{command.name} {limits[ended.limit]}{output}")
    if record.trace is None:
        raise UsageError(f"{command.name} cannot be followed: {record.problem}")
    return records.keep(key, record, began_ns)


def _job(record: ScriptRecord, name: str, recorded: Callable[[], StepTrace | None] | None = None) -> TrainingJob:
    def absent(*_: object) -> NoReturn:
        raise UsageError("a script has no module that could be built by itself")

    chosen = record.settings
    search = search_settings(benchmark=bool(chosen.get("cudnn_benchmark")))
    names = {field.name for field in fields(ScriptSettings)}
    settings: dict[str, Any] = {name: value for name, value in chosen.items() if name in names}
    return TrainingJob(
        name=name,
        build=absent,
        batch=lambda _device: ((), None),  # a report would list its tensors
        settings=ScriptSettings(**settings),
        batch_size=max(1, record.batch_size),
        recorded=recorded and functools.cache(recorded),
        search=replace(
            search,
            allow_tf32=bool(chosen.get("cudnn_allow_tf32", search.allow_tf32)),
            deterministic=bool(chosen.get("cudnn_deterministic", search.deterministic)),
        ),
        key=record.key,
    )


def _notes(record: ScriptRecord) -> Iterator[Note]:
    settings = record.settings
    precision = settings.get("precision_in_words", settings.get("precision"))
    micro = f", {settings['accumulation']} backward passes in a step" if "accumulation" in settings else ""
    text = (
        f"the script trains with {settings.get('optimizer')}, {precision}, {record.batch_size} samples in a forward "
        f"pass{micro}"
    )
    yield Note("script-settings", INFO, text)
    also = ("implementation", "clip_norm", "clip_value", "zero_grad", "checkpointing", "checkpoint_reentrant")
    if more := [f"{name}={settings[name]}" for name in also if name in settings]:
        yield Note("script-settings", INFO, f"the script also chooses {', '.join(more)}")
    yield from (Note("script", WARNING, text) for text in record.notes)
