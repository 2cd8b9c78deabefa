"""The command `learn.estimate`: one job or a file of jobs in, a table or JSON out.

Start reading at `entry`; `learn.estimation.estimating` computes the estimates.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conf.cli.settings import Checked, data_key, format_key, group, key
from conf.errors import CommandError, UsageError
from conf.plain_text import MISSING
from featurize.configs.trial import TrialConfig, config_from_mapping, config_of_user
from featurize.device.device_spec import (
    DEFAULT_DEVICE,
    DESCRIBED,
    DeviceSpec,
    describe_device,
    device_from_mapping,
    device_names,
)
from featurize.job.code_names import trust_key
from featurize.job.layout import Parallel, names_network_only, parse_parallel
from featurize.job.training_settings import (
    COMPILE_MODES,
    FLOAT8_RECIPES,
    FRAMEWORKS,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    QUANTIZATIONS,
    TrainingKeywords,
)
from learn.estimation.bounds import NONE, RUNS
from learn.estimation.estimate_view import (
    AMD_GPU,
    PROBLEM,
    Note,
    PastRun,
    bound_name,
    coverage_text,
    load_run,
    print_json,
    print_notes,
    print_table,
    rate,
)
from learn.estimation.estimating import (
    BOUND,
    BY,
    METHODS,
    POINT,
    DeviceFit,
    LargestBatch,
    devices_that_fit,
    estimate,
    estimate_many,
    largest_batch,
)
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import ScriptKeywords
from learn.estimators.protocol import LEVEL
from learn.job.training_job import DEFAULT_DTYPE, LOOPS, load_factory, model_batches, model_inputs, name_of

if TYPE_CHECKING:
    from learn.estimation.requests import AnyModel, Inputs


FILES = ("report", "snapshot")
IMPORTANT, ALL = NOTES = ("important", "all")
LARGEST_BATCH, DEVICES = FINDS = ("largest_batch", "devices")


def _choices(names: Sequence[str]) -> str:
    """Return the names as a list in a sentence: `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


# Setting -> its meaning, and its kind where the annotation does not tell it.
_TRAINING: dict[str, str | tuple[str, str]] = {
    "optimizer": f"adam (the default), {_choices(tuple(OPTIMIZERS)[1:])}",
    "precision": "fp32 (the default), tf32, bf16 or fp16 (autocast), bf16-true or fp16-true (weights in that type)",
    "cudnn_benchmark": "true where torch.backends.cudnn.benchmark is on; default false",
    "channels_last": "true for the channels-last memory format; default false",
    "implementation": f"{_choices(IMPLEMENTATIONS)}, of the optimizer; default torch's own choice on a GPU",
    "weight_decay": ("the optimizer's; default 0.01 with AdamW, else 0", "number >= 0 | null"),
    "accumulation": ("micro-steps, each of one batch, before the optimizer steps; default 1", "int >= 1 | null"),
    "clip_norm": ("largest norm of all gradients; default no clipping", "number > 0 | null"),
    "clip_value": ("largest absolute value of a gradient; default no clipping", "number > 0 | null"),
    "set_to_none": "false where zero_grad fills the gradients with zeros instead of freeing them; default true",
    "zero_grad": "before_forward, or after_forward where it is called between loss and backward pass; "
    "default before_forward",
    "holds_output": "false where the step is a function that leaves no output behind; default true",
    "grad_scaler": "true where a GradScaler scales the loss; default with precision=fp16 only",
    "ema": "true for a moving average of all weights on the GPU; default false",
    "optimizer_in_backward": "true where each weight is updated as soon as its gradient is computed; default false",
    "checkpointing": "recompute the activations of the repeated blocks: full, or selective (keep products and "
    "attention); default none",
    "checkpoint_every": ("checkpoint every n-th block; default 1", "int >= 1 | null"),
    "checkpoint_reentrant": "true for the reentrant variant of torch.utils.checkpoint; default false",
    "offload_activations": "true where saved tensors wait in host memory; default false",
    "offload_optimizer": "true where state and step of the optimizer are on the host; default false",
    "compile": (
        f"true where torch.compile compiles the model, or its mode: {_choices(COMPILE_MODES)}; default false",
        "bool | text | null",
    ),
    "framework": f"what launches the kernels, {_choices(FRAMEWORKS)}; default compiled with compile=, megatron with "
    "tp or pp, else eager",
    "float8": f"linear layers multiply 8-bit floats, by torchao's recipe {_choices(FLOAT8_RECIPES)}; default not",
    "float8_skip": ("linear layers that are not converted; default the output layer", "list of text | null"),
    "float8_all_gather": "true where FSDP2 gathers weights as 8-bit floats (float8=tensorwise); default false",
    "quantize": f"store the frozen weights of linear layers as {_choices(QUANTIZATIONS)}; default not",
    "quantize_skip": ("linear layers that are not quantized; default the output layer", "list of text | null"),
    "quantize_keeps_inputs": "true for bitsandbytes before 0.43.2, whose 4-bit layers keep their inputs; default false",
}
SETTINGS = tuple(TrainingKeywords.__annotations__)  # a trial config has its own


def _training_keys() -> type:
    """Return the settings class of `Training`'s fields, each None where nothing was given."""
    keys = []
    for name, annotation in typing.get_type_hints(TrainingKeywords).items():
        meaning = _TRAINING[name]
        text, kind = (meaning, "") if isinstance(meaning, str) else meaning
        keys.append((name, annotation, key(None, f"for model: {text}", kind)))
    return make_dataclass("TrainingKeys", keys, bases=(Checked,), frozen=True, kw_only=True)


if TYPE_CHECKING:

    class TrainingKeys(Checked): ...
else:
    TrainingKeys = _training_keys()


def described_device(values: Mapping[str, Any]) -> DeviceSpec:
    """Return the GPU model of a file of `conf/device/`. Raises `UsageError` for a backend that runs trials."""
    if "backend" in values:
        raise UsageError(
            f"device={values['backend']} runs trials; an estimate is for a GPU model: {', '.join(device_names())}"
        )
    return device_from_mapping(values)


@dataclass(frozen=True, kw_only=True)
class ModelKeys(TrainingKeys):
    """The keys of a command about one model."""

    model: str | None = key(
        None, "MODULE:FACTORY, a torch.nn.Module, a function that gives one, or a model class of transformers"
    )
    input: list[Any] | Mapping[str, Any] | None = key(
        None,
        "for model: its input's shape, as in [64,3,224,224], several as in [[8,128],[8,128]], or keyword arguments: "
        "'{input_ids: [8,128], labels: [8,128]}'; '{shape: [8,128], dtype: int64}' in place of a shape",
    )
    input_dtype: str = key(DEFAULT_DTYPE, "type of inputs that name none; int64 for token ids")
    arguments: Mapping[str, Any] | str | None = key(
        None,
        "for model: the factory's, as in '{num_classes: 10}'; of transformers' models, fields of their configuration",
        "mapping | any text | null",
    )
    allocator: str | None = key(
        None, "the caching allocator's settings, as PYTORCH_ALLOC_CONF has them: expandable_segments:True,..."
    )
    loop: str | None = key(
        None, "default that of run=, else for each figure the one that its source knows", choices=LOOPS
    )
    machine: str | None = key(
        None,
        "memory outside PyTorch's allocator: current (CUDA 12, lazy loading), eager, described, or a file of "
        "learn.calibrate; default the data folder's for this GPU, else current",
    )
    workspaces: str | None = key(
        None,
        "those of traced convolutions: guessed (default); cudnn: asks cuDNN, without a GPU (extra cudnn); auto: cudnn "
        "where it is installed and knows the GPU model, else guessed",
    )
    torch_version: str | None = key(
        None,
        "the job's PyTorch release, as 2.4; only cuDNN's workspaces follow it, with "
        "workspaces=cudnn or auto; default the installed one",
        "text | null",
    )
    format: str = format_key()
    data: str | None = data_key()


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(ModelKeys):
    """Which job to estimate, and how. Raises `UsageError`.

      python -m learn.estimate model=torchvision.models:resnet50 input=[64,3,224,224] report=resnet50.html
      python -m learn.estimate model=mypackage.nets:make_gpt input=[8,1024] input_dtype=int64 precision=bf16
      python -m learn.estimate model=mypackage.nets:make_bert input='{input_ids: [8,64], labels: [8]}' input_dtype=int64
      python -m learn.estimate model=torchvision.models:resnet50 input=[8,3,224,224] find=largest_batch
      python -m learn.estimate model=timm.models:vit_base_patch16_224 input=[64,3,224,224] estimator=xmem
      python -m learn.estimate model=transformers:GPT2LMHeadModel input=[8,64] input_dtype=int64 arguments='{n_layer:6}'
      python -m learn.estimate config='{family: mlp, batch_size: 256, input_size: 4096, classes: 10, depth: 4}'
      python -m learn.estimate "config='$JSON'"  # JSON, as runs.config holds it, needs quotes of its own
      python -m learn.estimate run=RUN_ID format=json
      python -m learn.estimate configs=jobs.jsonl method=fast format=json  # a trial config a line, thousands a second
      python -m learn.estimate device=H100-SXM5-80GB -- python train.py --batch 64  # a training script, unchanged
      python -m learn.estimate -- torchrun --nproc-per-node 8 train.py  # one on several GPUs: rank 0
      python -m learn.estimate --server http://127.0.0.1:8350 model=torchvision.models:resnet50 input=[64,3,224,224]

    The model never takes real memory: it is built and traced on the meta device (only estimator=xmem runs it, on the
    CPU). Figures come from the models that you fitted (python -m learn.fit), else from those that come with the project
    (learn/default_models/MODEL_CARD.md says what they know), and from the trace for what neither knows.
    After `--`: a training script. It runs unchanged, in a child process on this machine's CPU, until two optimizer
    steps are done. It sees one GPU of the model asked for, whose tensors take no memory. It runs with your rights:
    estimate only scripts that you would run. Its data is read for real; what it saves is kept in a folder that is
    removed; experiment loggers and the network are switched off.
    The report is one HTML page: memory over the step, the peak and its operator, what it consists of, module by module,
    and the step's time by kind of kernel.
    """

    SPELLINGS: ClassVar = {"device[": "devices"}
    COMMON: ClassVar = (
        "model",
        "input",
        "input_dtype",
        "batch",
        "arguments",
        "config",
        "run",
        "device",
        "optimizer",
        "precision",
        "checkpointing",
        "parallel",
        "find",
        "report",
        "format",
        "data",
    )

    device: DeviceSpec | None = group(
        None, "GPU model, by default A100-SXM4-40GB, and for run= the run's own", described_device, described=True
    )
    devices: tuple[str, ...] = key(
        None,
        "GPU models of a table, as in [A100-SXM4-40GB,L4]; device=[...] says the same; default those of find=devices: "
        "all",
        "text | list of text | null",
        build=lambda names: (names,) if isinstance(names, str) else tuple(names or ()),
    )
    batches: list[Any] | Mapping[Any, Any] | None = key(
        None,
        "for model: the input of each step, as in [[8,128],[8,512]]; or sequence lengths for input=, as in "
        "[128,512,128], or their shares, as in '{128: 0.7, 512: 0.3}'",
        "list | mapping | null",
    )
    batch: int | None = key(
        None, "for model: samples in a batch; scales the first dimension of every input", "int >= 1 | null"
    )
    config: Mapping[str, Any] | str | None = key(
        None, "a trial config: '{family: cnn, ...}', or what runs.config holds", "mapping | text | null"
    )
    configs: str | None = key(
        None,
        "a file of trial configs, a JSON object a line (- is standard input); printed likewise, with format=json",
        "path",
    )
    run: str | None = key(
        None, "a run of the warehouse: estimates its config and shows the figures of the run beside it"
    )
    power_limit_w: float | None = key(
        None,
        "the GPU's limit (nvidia-smi -pl), which step time, utilization and energy follow; default the board's own",
        "number > 0 | null",
    )
    estimator: str | None = key(
        None, "an unknown name lists them all; default the newest fitted hybrid, else the packaged one"
    )
    method: str = key(
        "full",
        "fast: from a trial config alone, without tracing it, by fitted trees; prints its held-out error",
        choices=METHODS,
    )
    coverage: float = key(
        LEVEL,
        "share of jobs that stay below the bound, above 0.5 and at most 0.99; method=fast has 0.99 only",
        "number",
    )
    known: list[Any] | Mapping[str, Any] | str | None = key(
        None,
        "measured runs of this job, which adjust the estimate and narrow its bound: "
        "'[{batch_size: 32, memory_mib: 10240, kind: process}]'; kind is process (default), card, reserved or "
        "allocated; device is the run's GPU model, default the job's. For config: default the data folder's "
        "runs on this GPU model; runs: the same, and a note without any; none ignores them",
        "list | mapping | text | null",
    )
    parallel: Parallel | Mapping[str, Any] | str | None = key(
        None,
        "several GPUs, by the degrees of pp, ddp, fsdp, cp, tp, ep, hsdp or own: ddp=8, or fsdp=8,tp=2, or "
        "'{ddp: 16, gpus_per_node: 8, network_gb_s: 25}', or ddp=8,zero=2 of DeepSpeed; the batch is one rank's, or "
        "that of ranks which share it; docs/parallel.md has the settings; for a script only network_gb_s=25; "
        "default one GPU",
        "mapping | text | null",
    )
    find: str | None = key(
        None,
        "for model and config: the largest batch that fits, or the devices that the job fits; default one estimate",
        choices=FINDS,
    )
    by: str | None = key(
        None, "for find: what has to fit; 99 of 100 jobs stay below the bound; default bound", choices=BY
    )
    report: str | None = key(None, "write an HTML page that explains the estimate into this file", "new path")
    snapshot: str | None = key(
        None, "write the step's memory into this file, for PyTorch's viewer (pytorch.org/memory_viz)", "new path"
    )
    notes: str = key(IMPORTANT, "notes of a table; important: at most three", choices=NOTES)
    server: str | None = key(
        None,
        "URL of a service (farm.serve) that answers in place of this machine, as http://127.0.0.1:8350; "
        "$GPUFARM_TOKEN is its token",
    )
    time_limit_s: float = key(600, "for a script: it is ended after this many seconds", "number > 0")
    memory_limit_gib: float | None = key(
        None, "for a script: its most memory on this machine; default three quarters", "number > 0 | null"
    )
    show_output: bool = key(False, "for a script: show what it prints, on standard error")
    trust: tuple[str, ...] = trust_key(
        "modules whose code may run where run= or configs= name it, as in [mypackage]; default none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # One GPU stays as given: it overrides the layout of a config. So does the network, which a script takes.
        if not names_network_only(self.parallel):
            object.__setattr__(self, "parallel", parse_parallel(self.parallel, files=True) or self.parallel)
        if self.devices and self.find is None:
            object.__setattr__(self, "find", DEVICES)

    def require_one_job(self) -> None:
        """Raise `UsageError` unless the keys name one job that is not a script, and what belongs to it."""
        given = [name for name in ("model", "config", "run", "configs") if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise UsageError(
                f"give one of model=MODULE:FACTORY, config={{...}}, run=RUN_ID and configs=FILE; got {named}"
            )
        counterparts = {"input": "own inputs", "batches": "own inputs", "batch": "batch_size"}
        if self.model is None and (of_model := [name for name in counterparts if getattr(self, name) is not None]):
            raise UsageError(f"{of_model[0]} is for model=; a trial config has its {counterparts[of_model[0]]}")
        if self.run is not None and self.known == RUNS:
            raise UsageError("known=runs cannot be combined with run=: the run would be used to estimate itself")
        self._require_what_find_takes()

    def _require_what_find_takes(self) -> None:
        if self.find is None:
            if self.by is not None:
                raise UsageError("by is for find=largest_batch and find=devices")
            return
        if self.devices and self.find != DEVICES:
            raise UsageError(f"find={self.find} is of one GPU model; name it with device=")
        if self.model is None and self.config is None:
            raise UsageError(f"find={self.find} is for model= and config=")
        default = {"report": None, "snapshot": None, "method": "full", "power_limit_w": None}
        if one_only := [name for name, value in default.items() if getattr(self, name) != value]:
            raise UsageError(f"find={self.find} does not take {', '.join(one_only)}")

    def how(self) -> dict[str, Any]:
        """Return the keywords of `learn.estimate` that say what the job runs on and how its answer is wanted."""
        given = {name: getattr(self, name) for name in ScriptKeywords.__annotations__}
        return {**given, "device": self.device or DEFAULT_DEVICE}

    def print_answer(self, title: str, answer: Estimate, past: PastRun | None = None) -> None:
        """Print the estimate of one job in the format, with the notes that the keys ask for."""
        if self.format == "json":
            print_json(title, answer, past)
        else:
            print_table(title, answer, past, all_notes=self.notes == ALL)


def _refuse(settings: EstimateSettings, names: Iterable[str], why: str) -> None:
    """Raise `UsageError` for those of these keys that were given."""
    usual = EstimateSettings()
    if given := [name for name in names if getattr(settings, name) != getattr(usual, name)]:
        raise UsageError(f"{why}; leave {', '.join(given)} out")


def entry(settings: EstimateSettings) -> int:
    """Estimate one of model=, config=, run= and configs=, here or by a service, and print it. Returns the exit code."""
    if settings.server is not None:
        return entry_of_server(settings)
    settings.require_one_job()
    open_data(settings.data)
    if settings.configs is not None:
        return _print_many(settings.configs, settings)
    past = None
    config: TrialConfig | None = None
    device: DeviceSpec | str | None = settings.device
    loop, machine, input_dtype = settings.loop, settings.machine, DEFAULT_DTYPE
    if settings.run is not None:
        past = load_run(settings.data, settings.run, settings.trust)
        title, config = f"run {past.run_id}", past.config
        device = device or (past.device and describe_device(past.device))  # a row names no file
        if past.source != "measured":  # its label is of the machine that its device's description is of
            machine = machine or DESCRIBED
        if settings.method == "full":
            loop = loop or past.loop  # so that like is compared with like
    elif settings.config is not None:
        config = config_of_user(config_mapping(settings.config))
        title = f"{name_of(config)}, batch {config.batch_size}"
    else:
        assert settings.model is not None
        title = settings.model
        input_dtype = settings.input_dtype
    if settings.arguments is not None and settings.model is None:
        raise UsageError("arguments are for model=; a trial config of the family zoo has its own")
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints does not belong to the output
        job = load_factory(title, settings.arguments) if config is None else config
        inputs = model_inputs(settings.input, settings.batch)
        batches = model_batches(settings.batches, settings.batch)
    known = settings.known if past is None or settings.known is not None else NONE  # its own figures stand beside it
    options = {
        **settings.how(),
        **{name: getattr(settings, name) for name in SETTINGS},
        "loop": loop,
        "machine": machine,
        "known": known,
        "batches": batches,
        "trust": settings.trust,
        "input_dtype": input_dtype,
        "parallel": settings.parallel,
    }
    if settings.find is not None:
        return print_fits(settings, title, job, inputs, options)
    with contextlib.redirect_stdout(sys.stderr):
        answer = estimate(
            job,
            inputs,
            name=title,
            method=settings.method,
            report=settings.report,
            snapshot=settings.snapshot,
            **{**options, "device": device or DEFAULT_DEVICE},
        )
    settings.print_answer(title, answer, past)
    for name in FILES:
        if (path := getattr(settings, name)) is not None:
            print(f"{name}: {path}", file=sys.stderr if settings.format == "json" else sys.stdout)
    return 0


def _print_many(path: str, settings: EstimateSettings) -> int:
    """Estimates of a file's configs, one JSON object a line, in the lines' order."""
    single = ("allocator", "report", "snapshot", "parallel", "power_limit_w")
    _refuse(settings, (*SETTINGS, *single), "configs= has one job a line, each with its own settings")
    if settings.format != "json":
        raise UsageError("configs=FILE prints one JSON object a line: give format=json with it")
    configs = []
    for number, line in _lines(path):
        try:
            configs.append(config_from_mapping(config_mapping(line)))
        except CommandError as error:
            raise UsageError(f"configs={path}, line {number}: {error}") from error
    for answer in estimate_many(configs, method=settings.method, trust=settings.trust, **settings.how()):
        print(json.dumps(answer.to_mapping()))
    return 0


def _lines(path: str) -> list[tuple[int, str]]:
    """Return the lines that hold something, each with its number in the file; `-` is standard input."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"configs={path} cannot be read: {error}") from error
    # Not splitlines(): a JSON string may hold what Unicode calls a line's end.
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def config_mapping(value: Any) -> Mapping[str, Any]:
    """Return a config as Hydra parsed it, or as the JSON text that `runs.config` holds."""
    value = _parse_json("config", value)
    if not isinstance(value, Mapping):
        raise UsageError(f"config is a mapping, as in config='{{family: cnn, ...}}', got {value!r}")
    return value


def _parse_json(name: str, value: Any) -> Any:
    """Return the content of a key that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, and endless brackets
        raise UsageError(f"{name} is neither a mapping nor JSON: {error}") from error


_WIDTH_WITH_ENERGY, _COLUMNS = 90, 7  # characters; columns of a table that is less wide


def print_fits(
    settings: EstimateSettings, title: str, job: AnyModel, inputs: Inputs | None, options: Mapping[str, Any]
) -> int:
    """Find what fits and print it. Returns the exit code.

    Args:
        settings: `find`, with the keys that belong to it.
        title: The job's name in the answer.
        job, inputs: As `learn.estimate` takes them.
        options: Further keywords of `learn.estimate`.

    Raises:
        UsageError: A single device for `devices`; what the search itself raises.
    """
    if settings.find == DEVICES and settings.device is not None:
        raise UsageError(f"find={DEVICES} goes over all GPU models, or over those of device=[A,B]: not over one")
    by, all_notes = settings.by or BOUND, settings.notes == ALL
    largest: LargestBatch | None = None
    fits: tuple[DeviceFit, ...] = ()
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints does not belong to the output
        if settings.find == DEVICES:
            fits = devices_that_fit(job, inputs, devices=settings.devices or None, by=by, **options)
        else:
            largest = largest_batch(job, inputs, by=by, **options)
    if settings.format == "json":
        answer = (
            {"devices": [device_fit.to_mapping() for device_fit in fits]} if largest is None else largest.to_mapping()
        )
        print(json.dumps({"subject": title, "by": by, **answer}, indent=1))
    elif largest is None:
        answers = [device_fit.estimate for device_fit in fits if device_fit.estimate is not None]
        of_amd = {note: None for estimate in answers for note in estimate.notes if note.code == AMD_GPU}
        shared = {note: None for note in answers[0].notes if all(note in estimate.notes for estimate in answers)}
        problems = [
            Note("no-answer", PROBLEM, f"{device_fit.device}: {device_fit.problem}")
            for device_fit in fits
            if device_fit.problem is not None
        ]
        bound = bound_name(answers[0]).replace(" bound", "\nbound")
        heads = ["device", "peak", bound, "may\ntake", "room", "fits", "samples/s", "J a step"]
        notes = [*problems, *{**of_amd, **shared}]
        _print(f"{title}, memory in MiB", heads, map(_row_of_device, fits), answers, notes, all_notes)
    else:
        at_limit = largest.estimate or largest.beyond
        assert at_limit is not None  # one of both batches was estimated
        decided_by = POINT if at_limit.upper_mib is None else by
        least = "at least " if largest.is_lower_bound else ""
        line = f"{title}: the largest batch on {at_limit.device} is {least}{largest.batch:,}, by the {decided_by}"
        if largest.is_lower_bound:
            line += "; no larger one is tried"
        heads = ["batch", "peak memory", bound_name(at_limit), "the card", "fits"]
        _print(line, heads, _rows_of_batches(largest), [at_limit], at_limit.notes, all_notes)
    return 0


def _print(
    line: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    answers: Sequence[Estimate],
    notes: Collection[Note],
    all_notes: bool,
) -> None:
    """Print a line, a table and notes. The table of devices is 80 characters wide; energy, the last of its columns, is
    shown where the terminal is wider."""
    from rich.console import Console
    from rich.table import Table

    screen, table = Console(), Table()
    shown = heads if screen.width >= _WIDTH_WITH_ENERGY else heads[:_COLUMNS]
    for name in shown:
        table.add_column(name, justify="left" if name == heads[0] else "right", no_wrap=name == heads[0])
    for row in rows:
        table.add_row(*row[: len(shown)])
    screen.print(line, soft_wrap=True, highlight=False, markup=False)
    screen.print(table)
    checks = dict.fromkeys(text for answer in answers if (text := coverage_text(answer)))
    if checks:
        screen.print(f"{bound_name(answers[0])}: {'; '.join(checks)}", soft_wrap=True, highlight=False, markup=False)
    print_notes(screen, notes, all_notes=all_notes)


def _rows_of_batches(largest: LargestBatch) -> Iterator[list[str]]:
    for batch, answer in ((largest.batch, largest.estimate), (largest.batch + 1, largest.beyond)):
        if answer is not None:
            memory = (answer.peak_memory_mib, answer.upper_mib, answer.device_memory_mib)
            texts = [MISSING if mib is None else f"{mib:,.0f} MiB" for mib in memory]
            yield [f"{batch:,}", *texts, "yes" if batch == largest.batch else "no"]


def _row_of_device(device_fit: DeviceFit) -> list[str]:
    if (answer := device_fit.estimate) is None:
        return [device_fit.device, *[MISSING] * 7]
    memory = [
        MISSING if mib is None else f"{mib:,.0f}"
        for mib in (answer.peak_memory_mib, answer.upper_mib, answer.limit_mib, device_fit.room_mib)
    ]
    time = [MISSING if value is None else rate(value) for value in (answer.samples_per_s, answer.energy_j)]
    return [device_fit.device, *memory, "yes" if device_fit.fits else "no", *time]


# Keys that name another job than a script, or that the script chooses itself.
_OF_OTHER_JOBS = (
    "model",
    "input",
    "batches",
    "batch",
    "find",
    "by",
    "arguments",
    "config",
    "configs",
    "run",
    "server",
    *SETTINGS,
    "trust",
    "devices",
    "input_dtype",
)


def entry_of_script(settings: EstimateSettings, command: Sequence[str]) -> int:
    """Estimate the training script that `command` starts, and print the estimate. Returns the exit code."""
    from learn.script.estimating import estimate_script

    _refuse(settings, _OF_OTHER_JOBS, "a script says itself what it trains")
    if settings.method != "full":
        raise UsageError("a script is estimated with method=full")
    open_data(settings.data)
    options = {name: getattr(settings, name) for name in ("parallel", *FILES, *_OF_SCRIPTS)}
    title = " ".join(command)
    settings.print_answer(title, estimate_script(command, name=title, **settings.how(), **options))
    return 0


_OF_SCRIPTS = ("time_limit_s", "memory_limit_gib", "show_output")


def open_data(data: str | None) -> None:
    """Raise `CommandError` for a data folder that is named and cannot be read."""
    if data is not None:
        from warehouse.files.folder import DataFolder

        DataFolder.resolve(data).open()


TOKEN_VARIABLE = "GPUFARM_TOKEN"
# Keys of this machine: its data folder, its files, and what the service decides itself.
_HERE = (
    "configs",
    "run",
    "batches",
    "estimator",
    "power_limit_w",
    "torch_version",
    "known",
    "find",
    "by",
    "report",
    "snapshot",
    "data",
    "memory_limit_gib",
    "trust",
    "devices",
)
_SAME = ("coverage", "machine", "loop", "allocator", "workspaces")


def entry_of_server(settings: EstimateSettings) -> int:
    """Ask the service for one estimate and print it. Returns the exit code."""
    from learn.client import Client

    _refuse(settings, _HERE, "server= answers for model= and config=")
    settings.require_one_job()
    body = request_of(settings)
    title = settings.model or f"{body['config'].get('family')}, batch {body['config'].get('batch_size')}"
    with Client(settings.server or "", token=os.environ.get(TOKEN_VARIABLE)) as service:
        answer = service.estimate(**body)
    settings.print_answer(title, answer)
    return 0


def request_of(settings: EstimateSettings) -> dict[str, Any]:
    """Return the fields of the request, as `Client.estimate` takes them."""
    training = {name: value for name in SETTINGS if (value := getattr(settings, name)) is not None}
    how = {name: value for name in _SAME if (value := getattr(settings, name)) is not None}
    body: dict[str, Any] = {"device": DEFAULT_DEVICE if settings.device is None else settings.device.name, **how}
    if settings.method != "full":
        body["method"] = settings.method
    if settings.parallel is not None:
        layout = settings.parallel
        body["parallel"] = layout if isinstance(layout, str | Mapping) else layout.text()
    if settings.config is not None:
        _refuse(settings, SETTINGS, "a trial config has its own training settings")
        return {**body, "config": dict(config_mapping(settings.config))}
    of_model = {"arguments": _parse_json("arguments", settings.arguments), "batch_size": settings.batch}
    if settings.input_dtype != DEFAULT_DTYPE:
        of_model["input_dtype"] = settings.input_dtype
    given = {name: value for name, value in of_model.items() if value is not None}
    return {**body, **given, "model": settings.model, "inputs": settings.input, "training": training}
