"""The command `learn.estimate`: one job or a file of jobs in, a table or JSON out.

Start reading at `entry`; `learn.estimation.estimating` computes the estimates.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, unknown_name
from conf.overrides import plain_values
from featurize.own_code import config_of_user, parse_trust
from featurize.trial import TrialConfig, config_from_mapping
from learn.cases import DEFAULT_DEVICE
from learn.estimation.estimating import estimate, estimate_many
from learn.estimation.model_names import load_factory
from learn.estimation.past_run import known_to, load_run

if TYPE_CHECKING:
    from omegaconf import DictConfig

FORMATS = ("table", "json")
SETTINGS = ("optimizer", "precision", "cudnn_benchmark", "channels_last")  # a trial config has its own
PATHS = ("configs", "report", "data")  # of the command's keys


def entry(cfg: DictConfig) -> int:
    """Estimate one of model=, config=, run= and configs=, and print it. Returns the exit code."""
    from featurize.device_spec import device_from_mapping, device_names
    from learn.cases import name_of
    from learn.estimation.estimate_view import print_json, print_table

    values = plain_values(cfg)
    values |= {key: str(values[key]) for key in PATHS if values[key] is not None}  # a file may be called 5
    given = [key for key in ("model", "config", "run", "configs") if values[key] is not None]
    if len(given) != 1:
        named = " and ".join(given) or "none"
        raise UsageError(f"give one of model=MODULE:FACTORY, config={{...}}, run=RUN_ID and configs=FILE; got {named}")
    if values["format"] not in FORMATS:
        raise unknown_name("format", values["format"], FORMATS)
    if values["model"] is None and values["input"] is not None:
        raise UsageError("input is for model=; a trial config has its own inputs")
    if values["data"] is not None:
        from warehouse.folder import DataFolder

        DataFolder.resolve(values["data"]).open()
    settings = {key: values[key] for key in (*SETTINGS, "estimator", "method", "data", "allocator", "report", "loop")}
    settings["trust"] = parse_trust(values["trust"])
    chosen = values.get("device")
    if chosen is not None and "backend" in chosen:
        raise UsageError(
            f"device={chosen['backend']} runs trials; an estimate is for a GPU model: {', '.join(device_names())}"
        )
    settings["device"] = DEFAULT_DEVICE if chosen is None else device_from_mapping(chosen)

    if values["configs"] is not None:
        return _print_many(values["configs"], settings, values["format"])
    past = None
    config: TrialConfig | None = None
    if values["run"] is not None:
        past = load_run(values["data"], values["run"], settings["trust"])
        title, config = f"run {past.run_id}", past.config
        if chosen is None and past.device is not None:
            settings["device"] = past.device
        if settings["method"] == "full":
            settings["loop"] = settings["loop"] or past.loop  # so that like is compared with like
    elif values["config"] is not None:
        config = config_of_user(_mapping(values["config"]))
        title = f"{name_of(config)}, batch {config.batch_size}"
    else:
        title = values["model"]
        settings["input_dtype"] = values["input_dtype"]
    if values["arguments"] is not None and values["model"] is None:
        raise UsageError("arguments are for model=; a trial config of the family zoo has its own")
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is none of the output
        job = load_factory(values["model"], values["arguments"]) if config is None else config
        done = estimate(job, values["input"], name=title, **settings)
    if past is not None:
        done = replace(done, warnings=(*done.warnings, *known_to(past, done, values["data"])))
    (print_json if values["format"] == "json" else print_table)(title, done, past)
    if values["report"] is not None:
        print(f"report: {values['report']}", file=sys.stderr if values["format"] == "json" else sys.stdout)
    return 0


def _print_many(path: str, settings: Mapping[str, Any], form: str) -> int:
    """Estimates of a file's configs, one JSON object a line, in the lines' order."""
    if given := [key for key in (*SETTINGS, "allocator", "report") if settings[key] is not None]:
        raise UsageError(f"configs= has one job a line, each with its own settings; leave {', '.join(given)} out")
    if form != "json":
        raise UsageError("configs=FILE prints one JSON object a line: give format=json with it")
    configs = []
    for number, line in _lines(path):
        try:
            configs.append(config_from_mapping(_mapping(line)))
        except UsageError as error:
            raise UsageError(f"configs={path}, line {number}: {error}") from error
    chosen = {key: settings[key] for key in ("device", "method", "estimator", "data", "trust", "loop")}
    for done in estimate_many(configs, **chosen):
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


def _mapping(value: Any) -> Mapping[str, Any]:
    """A config as Hydra parsed it, or as the JSON text that `runs.config` holds."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, and endless brackets
            raise UsageError(f"config is neither a mapping nor JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"config is a mapping, as in config='{{family: cnn, ...}}', got {value!r}")
    return value
