"""The command `learn.estimate`: one job or a file of jobs in, a table or JSON out.

Start reading at `entry`; `learn.estimation.estimating` computes the estimates.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from conf.errors import CommandError, UsageError, unknown_name
from conf.settings import data_key, group, key
from featurize.device_spec import DeviceSpec, describe_device, device_from_mapping, device_names
from featurize.machine import DESCRIBED
from featurize.own_code import config_of_user, parse_trust
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_text import names_network_only, parse_parallel
from featurize.trial import TrialConfig, config_from_mapping
from learn.cases import DEFAULT_DEVICE
from learn.commands.estimate_fits import DEVICES, FINDS, print_fits
from learn.commands.model_inputs import model_batches, model_inputs
from learn.commands.training_keys import TrainingKeys
from learn.estimation.estimating import estimate, estimate_many
from learn.estimation.job_estimate import Estimate
from learn.estimation.known_runs import NONE, RUNS
from learn.estimation.model_names import load_factory
from learn.estimation.past_run import PastRun, known_to, load_run
from learn.estimators import LEVEL

FORMATS = ("table", "json")
IMPORTANT, ALL = NOTES = ("important", "all")
DEFAULT_DTYPE = "float32"
SETTINGS = tuple(field.name for field in fields(TrainingKeys))  # a trial config has its own


def described_device(values: Mapping[str, Any]) -> DeviceSpec:
    """Return the GPU model of a file of `conf/device/`. Raises `UsageError` for a backend that runs trials."""
    if "backend" in values:
        raise UsageError(
            f"device={values['backend']} runs trials; an estimate is for a GPU model: {', '.join(device_names())}"
        )
    return device_from_mapping(values)


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(TrainingKeys):
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

    device: DeviceSpec | None = group(
        None, "GPU model, by default A100-SXM4-40GB, and for run= the run's own", described_device
    )
    devices: tuple[str, ...] = key(
        None,
        "GPU models of a table, as in [A100-SXM4-40GB,L4]; device=[...] says the same; default those of find=devices: "
        "all",
        "text | list of text | null",
    )
    model: str | None = key(
        None, "MODULE:FACTORY, a torch.nn.Module, a function that gives one, or a model class of transformers"
    )
    input: list[Any] | Mapping[str, Any] | None = key(
        None,
        "for model: its input's shape, as in [64,3,224,224], several as in [[8,128],[8,128]], or keyword arguments: "
        "'{input_ids: [8,128], labels: [8,128]}'; '{shape: [8,128], dtype: int64}' in place of a shape",
    )
    batches: list[Any] | Mapping[Any, Any] | None = key(
        None,
        "for model: the input of each step, as in [[8,128],[8,512]]; or sequence lengths for input=, as in "
        "[128,512,128], or their shares, as in '{128: 0.7, 512: 0.3}'",
        "list | mapping | null",
    )
    input_dtype: str = key(DEFAULT_DTYPE, "of the inputs that name no type; int64 for token ids")
    batch: int | None = key(
        None, "for model: samples in a batch; scales the first dimension of every input", "int >= 1 | null"
    )
    arguments: Mapping[str, Any] | str | None = key(
        None,
        "for model: the factory's, as in '{num_classes: 10}'; of transformers' models, fields of their configuration",
        "mapping | any text | null",
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
    allocator: str | None = key(
        None, "the caching allocator's settings, as PYTORCH_ALLOC_CONF has them: expandable_segments:True,..."
    )
    power_limit_w: float | None = key(
        None,
        "limit that is set on the GPU (nvidia-smi -pl); step time, utilization and energy follow it; default the "
        "board's own",
        "number > 0 | null",
    )
    estimator: str | None = key(
        None, "an unknown name lists them all; default the newest fitted hybrid, else the one that comes along"
    )
    method: str = key(
        "full",
        "full, or fast: from a trial config alone, without tracing it, by fitted trees; prints its held-out error",
    )
    loop: str | None = key(
        None, "resident or pipeline; default that of run=, else for each figure the one that its source knows"
    )
    machine: str | None = key(
        None,
        "what lies outside PyTorch's allocator: current (CUDA 12, lazy loading), eager, described, or a file of "
        "learn.calibrate; default the one calibrated for this GPU in the data folder, else current",
    )
    workspaces: str | None = key(
        None,
        "of convolutions, in the trace: guessed; cudnn: asks cuDNN, without a GPU (extra cudnn); auto: cudnn where it "
        "is installed and knows the GPU model, else guessed; default guessed",
    )
    torch_version: str | None = key(
        None,
        "release of PyTorch that the job runs, as 2.4; only cuDNN's workspaces follow it, with "
        "workspaces=cudnn or auto; default the installed one",
        "text | null",
    )
    coverage: float = key(
        LEVEL,
        "share of jobs that stay below the bound, above 0.5 and at most 0.99; method=fast has 0.99 only",
        "number",
    )
    known: list[Any] | Mapping[str, Any] | str | None = key(
        None,
        "measured runs of this job, which move the estimate and narrow its bound: "
        "'[{batch_size: 32, memory_mib: 10240, kind: process}]'; kind is process (the default), card, reserved or "
        "allocated; device is its GPU model, by default the one asked for. For config: default what the data folder "
        "measured of it on this GPU model; runs: the same, and a note where there is none; none leaves them out",
        "list | mapping | text | null",
    )
    parallel: Parallel | Mapping[str, Any] | str | None = key(
        None,
        "several GPUs, by the degrees of pp, ddp, fsdp, cp, tp, ep, hsdp or own, of which the batch is one's, or that "
        "of the ranks which share it: ddp=8, or fsdp=8,tp=2, or '{ddp: 16, gpus_per_node: 8, network_gb_s: 25}', or "
        "ddp=8,zero=2 of DeepSpeed; docs/parallel.md has the settings; for a script only network_gb_s=25; "
        "default one GPU",
        "mapping | text | null",
    )
    find: str | None = key(
        None,
        "for model and config: largest_batch (that fits the device), or devices (that the job fits); default one "
        "estimate",
    )
    by: str | None = key(
        None, "for find: what has to fit, bound (99 of 100 jobs stay below it) or point; default bound"
    )
    report: str | None = key(None, "write an HTML page that explains the estimate into this file", "new path")
    format: str = key("table", "table or json")
    notes: str = key(IMPORTANT, "of a table: important, at most three of them, or all")
    server: str | None = key(
        None,
        "URL of a service (python -m farm.serve) that answers in place of this machine, as http://127.0.0.1:8350; "
        "$GPUFARM_TOKEN is its token",
    )
    data: str | None = data_key()
    time_limit_s: float = key(600, "for a script: it is ended after this many seconds", "number > 0")
    memory_limit_gib: float | None = key(
        None, "for a script: memory of this machine that it may take; default three quarters", "number > 0 | null"
    )
    show_output: bool = key(False, "for a script: show what it prints, on standard error")
    trust: tuple[str, ...] = key(
        None,
        "modules whose code may run where run= or configs= name it, as in [mypackage]; default none",
        "text | list of text | null",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "trust", parse_trust(self.trust))
        # One GPU stays as given: it overrides the layout of a config. So does the network, which a script takes.
        if not names_network_only(self.parallel):
            object.__setattr__(self, "parallel", parse_parallel(self.parallel, files=True) or self.parallel)
        names = (self.devices,) if isinstance(self.devices, str) else tuple(self.devices or ())
        object.__setattr__(self, "devices", names)
        if names and self.find is None:
            object.__setattr__(self, "find", DEVICES)

    def require_one_job(self) -> None:
        """Raise `UsageError` unless the keys name one job that is no script, and what belongs to it."""
        given = [name for name in ("model", "config", "run", "configs") if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise UsageError(
                f"give one of model=MODULE:FACTORY, config={{...}}, run=RUN_ID and configs=FILE; got {named}"
            )
        if self.model is None and self.input is not None:
            raise UsageError("input is for model=; a trial config has its own inputs")
        if self.model is None and self.batches is not None:
            raise UsageError("batches is for model=; a trial config has its own inputs")
        if self.model is None and self.batch is not None:
            raise UsageError("batch is for model=; a trial config has its batch_size")
        if self.run is not None and self.known == RUNS:
            raise UsageError(
                "known=runs would take run=ID itself, whose figures stand beside the estimate; leave it out"
            )
        self._require_what_find_takes()

    def _require_what_find_takes(self) -> None:
        if self.find is None:
            if self.by is not None:
                raise UsageError("by is for find=largest_batch and find=devices")
            return
        if self.find not in FINDS:
            raise unknown_name("find", self.find, FINDS)
        if self.devices and self.find != DEVICES:
            raise UsageError(f"find={self.find} is of one GPU model; name it with device=")
        if self.model is None and self.config is None:
            raise UsageError(f"find={self.find} is for model= and config=")
        one_only = ["report"] if self.report is not None else []
        one_only += ["method"] if self.method != "full" else []
        one_only += ["power_limit_w"] if self.power_limit_w is not None else []
        if one_only:
            raise UsageError(f"find={self.find} does not take {', '.join(one_only)}")

    def require_format(self) -> None:
        """Raise `UsageError` for an unknown format, or an unknown choice of notes."""
        if self.notes not in NOTES:
            raise unknown_name("notes", self.notes, NOTES)
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)

    def print_answer(self, title: str, done: Estimate, past: PastRun | None = None) -> None:
        """Print the estimate of one job in the format, with the notes that the keys ask for."""
        from learn.estimation.estimate_view import print_json, print_table

        if self.format == "json":
            print_json(title, done, past)
        else:
            print_table(title, done, past, all_notes=self.notes == ALL)


def entry(settings: EstimateSettings) -> int:
    """Estimate one of model=, config=, run= and configs=, and print it. Returns the exit code."""
    from learn.workload import name_of

    settings.require_one_job()
    settings.require_format()
    if settings.data is not None:
        from warehouse.folder import DataFolder

        DataFolder.resolve(settings.data).open()
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
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is none of the output
        job = load_factory(title, settings.arguments) if config is None else config
        inputs = model_inputs(settings.input, settings.batch)
        batches = model_batches(settings.batches, settings.batch)
    known = settings.known if past is None or settings.known is not None else NONE  # its own figures stand beside it
    options = {
        **({} if batches is None else {"batches": batches}),
        "loop": loop, "machine": machine, "trust": settings.trust, "estimator": settings.estimator,
        "coverage": settings.coverage, "known": known, "data": settings.data,
        "allocator": settings.allocator, "input_dtype": input_dtype, "workspaces": settings.workspaces,
        "torch_version": settings.torch_version, "parallel": settings.parallel,
        **{name: getattr(settings, name) for name in SETTINGS},
    }  # fmt: skip
    if settings.find is not None:
        as_json = settings.format == "json"
        return print_fits(
            settings.find, title, job, inputs, device=settings.device, devices=settings.devices, by=settings.by,
            as_json=as_json, all_notes=settings.notes == ALL, options=options,
        )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        done = estimate(
            job, inputs, name=title, device=device or DEFAULT_DEVICE, power_limit_w=settings.power_limit_w,
            method=settings.method, report=settings.report, **options,
        )  # fmt: skip
    if past is not None:
        done = replace(done, notes=(*done.notes, *known_to(past, done, settings.data)))
    settings.print_answer(title, done, past)
    if settings.report is not None:
        print(f"report: {settings.report}", file=sys.stderr if settings.format == "json" else sys.stdout)
    return 0


def _print_many(path: str, settings: EstimateSettings) -> int:
    """Estimates of a file's configs, one JSON object a line, in the lines' order."""
    single = ("allocator", "report", "parallel", "power_limit_w")
    if given := [name for name in (*SETTINGS, *single) if getattr(settings, name) is not None]:
        raise UsageError(f"configs= has one job a line, each with its own settings; leave {', '.join(given)} out")
    if settings.format != "json":
        raise UsageError("configs=FILE prints one JSON object a line: give format=json with it")
    configs = []
    for number, line in _lines(path):
        try:
            configs.append(config_from_mapping(config_mapping(line)))
        except CommandError as error:
            raise UsageError(f"configs={path}, line {number}: {error}") from error
    for done in estimate_many(
        configs, device=settings.device or DEFAULT_DEVICE, method=settings.method, estimator=settings.estimator,
        data=settings.data, trust=settings.trust, loop=settings.loop, machine=settings.machine,
        coverage=settings.coverage, workspaces=settings.workspaces, known=settings.known,
        torch_version=settings.torch_version,
    ):  # fmt: skip
        print(json.dumps(done.to_mapping()))
    return 0


def _lines(path: str) -> list[tuple[int, str]]:
    """The lines that hold something, each with its number in the file; `-` is standard input."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"configs={path}: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"configs={path}, line {number}: this is no UTF-8 text") from error
    # Not splitlines(): a JSON string may hold what Unicode calls a line's end.
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def config_mapping(value: Any) -> Mapping[str, Any]:
    """A config as Hydra parsed it, or as the JSON text that `runs.config` holds."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, and endless brackets
            raise UsageError(f"config is neither a mapping nor JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"config is a mapping, as in config='{{family: cnn, ...}}', got {value!r}")
    return value
