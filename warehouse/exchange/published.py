"""Readers of published files of measurements: GPUMemNet's sets, timm models and well-known models on an A100.

Start reading at `read_published`. The header determines the format. No row is dropped: an impossible label has the
status `invalid` and a reason. GPUMemNet (arXiv 2602.17817) writes a configuration into a file name: `parse_filename`
reads it. This module needs neither models nor torch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from conf.errors import UsageError
from conf.files.identity import canonical_json
from warehouse.exchange.imported_rows import (
    DOUBT,
    STATUS,
    TRAINING,
    UNKNOWN_FAMILY,
    Columns,
    ImportedFile,
    NotOfThisSource,
    above_zero,
    config_columns,
    imported_runs,
    read_csv,
    to_number,
    whole_above_zero,
)

_ACTIVATIONS = {"swish": "silu"}
# `:` separates key and value, `_` separates pairs; keys and values may contain `_`.
_KEYS = {
    "mlp": ("input", "output", "depth", "arch", "batch", "act", "dropout", "batchnorm"),
    "cnn": (
        "input_channels",
        "num_classes",
        "depth",
        "arch",
        "base_filters",
        "batch",
        "input_size",
        "act",
        "dropout",
        "batchnorm",
    ),
    "transformer": (
        "num_classes",
        "embedding_size",
        "num_layers",
        "num_heads",
        "ff_hidden_size",
        "dropout_rate",
        "seq_length",
        "input_size",
        "num_samples",
        "batch_size",
    ),
}
_FIRST_KEY = {"input": "mlp", "input_channels": "cnn", "num_classes": "transformer"}
_UTILIZATION = {
    "Avg GPUTL": "gpu_util",
    "Avg SMACT": "smact",
    "Avg SMOCC": "smocc",
    "Avg DRAMA": "drama",
}

_SMALLEST_MAP = 7  # the published generator pools no further
_DENSE_LAYERS, _GROWTH_RATE = 4, 32  # layers and growth rate of a dense block


def parse_filename(name: str) -> dict[str, object]:
    """Parse the trial-config fields in a GPUMemNet file name. Raises `ValueError` with the reason.

    The names of the first half of the MLPs have no activation, dropout or batch norm: these are plain ReLU networks
    without the final softmax. A CNN's pooling between dense blocks was not recorded, see `settle_pooling`.
    """
    family = _FIRST_KEY.get(name.partition(":")[0])
    if family is None:
        raise ValueError("no known first key")
    keys = "|".join(sorted(_KEYS[family], key=len, reverse=True))
    _, *parts = re.split(rf"(?:^|_)({keys}):", name.removesuffix(".out"))
    values: dict[str, str] = {}
    switches: dict[str, str] = {}
    for key, text in zip(parts[::2], parts[1::2], strict=True):
        if key == "dropout" and text in ("True", "False"):
            switches["dropout"] = text  # `dropout:` occurs twice: the rate, then a switch
        elif key in values:
            raise ValueError(f"{key} twice")
        else:
            values[key] = text
    try:
        return {**_FIELDS[family](values, switches), **TRAINING}
    except KeyError as error:
        raise ValueError(f"lacks {error.args[0]}") from None


def _rate(values: Mapping[str, str], switches: Mapping[str, str]) -> float:
    return 0.0 if switches.get("dropout") == "False" else float(values["dropout"])


def _mlp(values: Mapping[str, str], switches: Mapping[str, str]) -> dict[str, object]:
    plain = "act" not in values
    return {
        "family": "mlp",
        "batch_size": int(values["batch"]),
        "input_size": int(values["input"]),
        "classes": int(values["output"]),
        "depth": int(values["depth"]),
        "topology": values["arch"],
        "activation": "relu" if plain else _ACTIVATIONS.get(values["act"], values["act"]),
        "batch_norm": not plain and _switch(values["batchnorm"]),
        "dropout": 0.0 if plain else _rate(values, switches),
        "softmax": not plain,
    }


def _cnn(values: Mapping[str, str], switches: Mapping[str, str]) -> dict[str, object]:
    return {
        "family": "cnn",
        "batch_size": int(values["batch"]),
        "image_size": int(values["input_size"]),
        "channels": int(values["input_channels"]),
        "classes": int(values["num_classes"]),
        "base_filters": int(values["base_filters"]),
        "depth": int(values["depth"]),
        "topology": values["arch"],
        "activation": _ACTIVATIONS.get(values["act"], values["act"]),
        "batch_norm": _switch(values["batchnorm"]),
        "dropout": _rate(values, switches),
        "softmax": True,
        "kernel_size": 3,
        "dilation": 1,
        "growth_rate": _GROWTH_RATE,
        "pooling": False,
        "pool_interval": 5,
    }


def _transformer(values: Mapping[str, str], _switches: Mapping[str, str]) -> dict[str, object]:
    return {
        "family": "transformer",
        "batch_size": int(values["batch_size"]),
        "vocabulary_size": int(values["input_size"]),
        "sequence_length": int(values["seq_length"]),
        "embedding_size": int(values["embedding_size"]),
        "heads": int(values["num_heads"]),
        "depth": int(values["num_layers"]),
        "feed_forward": int(values["ff_hidden_size"]),
        "classes": int(values["num_classes"]),
        "dropout": float(values["dropout_rate"]),
        "topology": "encoder",
        "activation": "relu",
        "softmax": False,
    }


def _switch(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"neither True nor False: {text!r}")
    return text == "True"


_FIELDS: Mapping[str, Callable[..., dict[str, object]]] = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}


def whole(config: Mapping[str, object], key: str) -> int:
    """Return the value of a key that is an integer in every config of these files."""
    value = config[key]
    assert isinstance(value, int), f"{key} is {value!r}"
    return value


def pool_intervals(image_size: int, depth: int) -> tuple[int, int]:
    """Return the two `pool_interval`s of a dense CNN that GPUMemNet's generator chose from at random."""
    halvings = max(1, int(math.log2(max(1, image_size // _SMALLEST_MAP))))
    return 5, max(1, math.ceil(depth / halvings))


def settle_pooling(config: Mapping[str, object], parameters: float | None) -> dict[str, object]:
    """Return a CNN's config with the `pool_interval` that yields this count of parameters.

    If neither does, the first is used. Configs without dense blocks are returned unchanged."""
    if config.get("topology") != "dense":
        return dict(config)
    intervals = pool_intervals(whole(config, "image_size"), whole(config, "depth"))
    fitting = (i for i in intervals if dense_parameters({**config, "pool_interval": i}) == parameters)
    return {**config, "pool_interval": next(fitting, intervals[0])}


def dense_parameters(config: Mapping[str, object]) -> int:
    """Return the parameters of a dense CNN, as the layer plan of the family `cnn` counts them."""
    growth, norm = whole(config, "growth_rate"), 2 if config["batch_norm"] else 0
    slope = 1 if config["activation"] == "prelu" else 0
    taps = whole(config, "kernel_size") ** 2
    count, width, blocks = 0, whole(config, "channels"), whole(config, "depth") // _DENSE_LAYERS
    pool_interval = whole(config, "pool_interval")
    for block in range(blocks):
        for _ in range(_DENSE_LAYERS):
            count += growth * (width * taps + 1 + norm) + slope
            width += growth
        if block % pool_interval == 0 and block != blocks - 1:
            half = width // 2
            count += half * (width + 1 + norm)
            width = half
    return count + (width + 1) * whole(config, "classes")


def utilization(row: Mapping[str, str]) -> dict[str, float | None]:
    """Return a row's mean utilizations over the run, in [0, 1]; None: not measured. Absent columns stay absent."""
    means = {}
    for column, name in _UTILIZATION.items():
        if column in row:
            value = to_number(row[column])
            if value is not None and name == "gpu_util":
                value /= 100  # nvidia-smi's percentage; the others are fractions
            means[name] = value if value is not None and 0 <= value <= 1 else None  # -1: not measured
    return means


DEVICE_NAME = "A100-SXM4-40GB"
TORCH_VERSION = "2.4.1"  # the release that all these files used
CUDA_VERSION = "12.2"
CARD_MIB = 40_960.0


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One measured training run. Values that were not measured are None or absent.

    file         stem of the file; row: its number, 1 for the first below the header
    status       ok; oom (the job needs more than the card, so `memory_mib` is not its need); invalid (no label)
    reason       why oom or invalid; doubt: why an `ok` or `oom` may be wrong, by comparison with other rows
    family       a configuration's family: mlp, cnn, transformer; None for a named model
    config       the complete trial config in mapping form, with defaults for fields that the file lacks; empty for a
                 named model, see `timm_config`
    model        name of a published model, group its module or kind; both None for configurations
    label        the run's name in the file: the file name that encodes a configuration, or a model's name
    memory_mib   peak of the device's memory in use, including CUDA context and driver
    parameters   parameter count of the file
    utilization  means over the run: gpu_util, smact, smocc, drama, each in [0, 1] or None
    estimates    published estimates in the file: name -> MiB
    """

    file: str
    row: int
    status: str
    reason: str | None = None
    doubt: str | None = None
    family: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    model: str | None = None
    group: str | None = None
    label: str | None = None
    batch_size: int | None = None
    memory_mib: float | None = None
    parameters: int | None = None
    utilization: Mapping[str, float | None] = field(default_factory=dict)
    estimates: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return `timm_a100:17`, for messages."""
        return f"{self.file}:{self.row}"

    @property
    def module(self) -> str:
        """Return the row's group: the topology of a configuration, or the module of a model."""
        if self.family is None:
            return self.group or self.model or "unknown"
        topology = self.config.get("topology")
        return f"{self.family}/{topology}" if topology else self.family


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """One file's rows, in file order. `form` is `gpumemnet`, `timm` or `models`; `columns` are the file's."""

    path: Path
    form: str
    rows: tuple[PublishedRow, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Published:
    """Result of `read_published`: files in alphabetical order, and the folder's CSV files of unknown form."""

    files: tuple[PublishedFile, ...]
    others: tuple[Path, ...] = ()


def read_published(path: str | Path | Sequence[str | Path], stems: Sequence[str] = ()) -> Published:
    """Read one file, several, or every recognised CSV file directly in a folder; `stems` selects some of them.

    Raises `UsageError` for a path that does not exist, a named file without a known header, a stem that the folder
    lacks, two files of one stem, and a folder without any such file.
    """
    roots = [Path(path)] if isinstance(path, str | Path) else [Path(entry) for entry in path]
    files: dict[str, PublishedFile] = {}
    others: list[Path] = []
    for root in roots:
        if not root.exists():
            raise UsageError(f"published={root}: there is no such file or folder")
        paths = [root] if root.is_file() else sorted(file for file in root.glob("*.csv") if file.is_file())
        for file in (file for file in paths if not stems or file.stem in stems):
            if file.stem in files:
                raise UsageError(
                    f"two files are called {file.stem}: {files[file.stem].path} and {file}; read one at a time"
                )
            try:
                files[file.stem] = _read_file(file)
            except NotOfThisSource:
                if stems or root.is_file():
                    raise
                others.append(file)
    where = ", ".join(map(str, roots))
    if missing := sorted(set(stems) - set(files)):
        raise UsageError(f"files={','.join(missing)}: no such CSV file in {where}")
    if not files:
        raise UsageError(f"published={where} holds no file with a known header; known: {known_headers()}")
    return Published(files=tuple(files[stem] for stem in sorted(files)), others=tuple(others))


def timm_config(row: PublishedRow) -> dict[str, object]:
    """Return the complete trial config of a timm model's row, in mapping form.

    The optimizer was not recorded. The measured peaks have room for one copy of the parameters beside weights and
    gradients: without a copy, large models at small batches would be one copy too low; with Adam's two, several would
    take less than their tensors. So the optimizer was SGD with momentum.
    """
    return {
        **TRAINING,
        "family": "timm",
        "model": row.model,
        "image_size": None,
        "batch_size": row.batch_size,
        "optimizer": "momentum",
    }


def read_published_runs(path: Path, device_name: str | None, *, source: str) -> ImportedFile:
    """Return the rows of one file of GPUMemNet's or of timm models. Raises `NotOfThisSource`.

    A run's identity is its configuration, card and memory. So measurements published again, with other columns or in
    another file, are the same runs. `device_name` None means the card of these files.
    """
    try:
        file = _read_file(path)
    except NotOfThisSource as error:
        raise NotOfThisSource(f"unknown header; known: {known_headers()}") from error
    if file.form == "models":
        raise NotOfThisSource("well-known models by name: no configurations of a family that could be rebuilt")
    if file.form != source:
        raise NotOfThisSource(f"its rows are of source={file.form}")
    other = {} if device_name in (None, DEVICE_NAME) else {"device_name": device_name}
    card: Columns = other or {"device_name": DEVICE_NAME, "device_memory_mib": CARD_MIB}
    contents = [
        canonical_json({"label": row.label, "batch_size": row.batch_size, "memory_mib": row.memory_mib, **other})
        for row in file.rows
    ]
    rows = imported_runs(source, [(row.row, {**card, **_columns(row)}) for row in file.rows], contents)
    measured_columns = sum(column == "Status" or column.startswith("Avg ") for column in file.columns)
    return ImportedFile(path, rows, measured_columns=measured_columns)


def _columns(row: PublishedRow) -> Columns:
    config = row.config
    if row.family is None and row.group is not None and row.status != "invalid":
        config = timm_config(row)
    family = row.family or ("timm" if row.group is not None else UNKNOWN_FAMILY)
    return {
        "family": family,
        "status": row.status,
        "oom_kind": "device" if row.status == "oom" else None,
        "error_type": DOUBT if row.doubt else None,
        "error": row.doubt or row.reason,
        "torch_version": TORCH_VERSION,
        "cuda_version": CUDA_VERSION,
        "batch_size": row.batch_size,
        **config_columns(config),
        # the transformers' counts lack the attention's input projections
        "parameters": None if family == "transformer" else row.parameters,
        "peak_memory_mib": row.memory_mib,
        **row.utilization,
    }


def _read_file(path: Path) -> PublishedFile:
    """Return the file's rows. Raises `NotOfThisSource` if it is not of a known form."""
    try:
        header, rows = read_csv(path)
    except UsageError as error:
        raise NotOfThisSource(f"published={path} is not a CSV file: {error.__cause__}") from error
    for form, (columns, read) in _FORMS.items():
        if columns <= set(header):
            return PublishedFile(path=path, form=form, rows=tuple(read(path.stem, rows)), columns=header)
    shown = ", ".join(sorted(header)[:12]) or "nothing"
    raise NotOfThisSource(f"published={path}: unknown header ({shown}); known: {known_headers()}")


def known_headers() -> str:
    """Return the known forms with their columns, for messages."""
    return "; ".join(f"{form} ({', '.join(sorted(columns))})" for form, (columns, _) in _FORMS.items())


def _read_gpumemnet(stem: str, rows: list[dict[str, str]]) -> Iterator[PublishedRow]:
    for number, row in enumerate(rows, start=1):
        memory = to_number(row["Max GPU Memory (MiB)"])
        problem = None
        config: dict[str, object] = {}
        parameters = to_number(row.get("Total Parameters"))
        try:
            config = settle_pooling(parse_filename(row["Filename"] or ""), parameters)
        except ValueError as error:
            problem = f"file name: {error}"
        status_cell = (row.get("Status") or "").strip()
        status = STATUS.get(status_cell, "invalid") if "Status" in row else "ok"
        if status == "invalid":
            problem = problem or f"status {status_cell or 'missing'}"
        if to_number(row.get("Depth")) == 0:
            problem = problem or "never started: depth 0"
        elif not memory or memory < 0:
            problem = problem or "never started: no memory"
        written_batch_size = to_number(row.get("Batch Size"))
        if config and written_batch_size is not None and written_batch_size != config["batch_size"]:
            problem = problem or "batch size is not the one in the file name"
        yield PublishedRow(
            file=stem,
            row=number,
            status="invalid" if problem else status,
            reason=problem or ("crashed out of memory" if status == "oom" else None),
            family=str(config["family"]) if config else None,
            config=config,
            label=row["Filename"],
            batch_size=whole(config, "batch_size") if config else None,
            memory_mib=memory if memory and memory > 0 else None,
            parameters=int(parameters) if parameters else None,
            utilization=utilization(row),
        )


# ---- models by name


def _read_timm(stem: str, rows: list[dict[str, str]]) -> Iterator[PublishedRow]:
    published_rows = []
    for number, row in enumerate(rows, start=1):
        peak = to_number(row.get("faketensor_peak_mib"))
        estimates = {} if peak is None else {"faketensor": peak}
        published_rows.append(_name_row(stem, number, row, row["max_gpu_memory_mib"], row["module"], estimates))
    return iter(_judge_batches(published_rows))


def _read_models(stem: str, rows: list[dict[str, str]]) -> Iterator[PublishedRow]:
    for number, row in enumerate(rows, start=1):
        columns = {column.removesuffix("_mib"): column for column in row if column and column.endswith("_mib")}
        estimates = {
            name: value
            for name, column in columns.items()
            if name != "actual" and (value := to_number(row[column])) is not None
        }
        yield _name_row(stem, number, row, row["actual_mib"], None, estimates)


def _name_row(
    stem: str, number: int, row: Mapping[str, str], memory: str, group: str | None, estimates: Mapping[str, float]
) -> PublishedRow:
    mib, batch = above_zero(memory), whole_above_zero(row["batch_size"])
    required = {"model name": row["model"], "batch size": batch, "memory": mib}
    problem = next((f"no {name}" for name, value in required.items() if not value), None)
    return PublishedRow(
        file=stem,
        row=number,
        status="invalid" if problem else "ok",
        reason=problem,
        model=row["model"] or None,
        group=group,
        label=row["model"],
        batch_size=batch,
        memory_mib=mib,
        estimates=estimates,
    )


class _Measured(NamedTuple):
    """A row that trained: its place among the rows, batch size and memory."""

    place: int
    batch_size: int
    memory_mib: float


def _judge_batches(rows: list[PublishedRow]) -> list[PublishedRow]:
    """Mark rows as out of memory if their tensors alone exceed the card, whatever usage was recorded.

    If memory falls at a larger batch, that row and those of all larger batches are marked too, unless the card cannot
    be the reason. Memory grows at most in proportion to the batch. So if half the batch took less than half the card,
    the fall is an excess of the smaller batch (a convolution's workspace).
    """
    by_model: dict[str, list[_Measured]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.status == "ok":
            assert row.model is not None and row.batch_size is not None and row.memory_mib is not None
            by_model[row.model].append(_Measured(index, row.batch_size, row.memory_mib))
    judged = list(rows)
    for measured in by_model.values():
        measured.sort(key=lambda held_row: held_row.batch_size)
        held: list[_Measured] = []  # smaller batches that did not run out of memory
        fell = False
        for position, held_row in enumerate(measured):
            index, row = held_row.place, rows[held_row.place]
            if row.estimates.get("faketensor", 0.0) > CARD_MIB:
                judged[index] = replace(row, status="oom", reason="its tensors alone fill more than the card")
                continue
            largest = max((r.memory_mib for r in held), default=0.0)
            most = min((r.memory_mib * held_row.batch_size / r.batch_size for r in held), default=float("inf"))
            if fell or (held_row.memory_mib < largest and most > CARD_MIB):
                reason = "a smaller batch ran out of memory" if fell else "less memory than at a smaller batch"
                fell = True
                is_small = row.estimates.get("faketensor", CARD_MIB) < CARD_MIB / 2
                doubt = "its tensors fill less than half the card" if is_small else None
                judged[index] = replace(row, status="oom", reason=reason, doubt=doubt)
                continue
            following = measured[position + 1] if position + 1 < len(measured) else None
            doubt = _doubt_of_ok(held_row, row.estimates.get("faketensor", 0.0), held, following)
            judged[index] = replace(row, doubt=doubt)
            held.append(held_row)
    return judged


def _doubt_of_ok(
    row: _Measured, tensors_mib: float, held: Sequence[_Measured], following: _Measured | None
) -> str | None:
    if tensors_mib > row.memory_mib:
        return "less memory than its tensors fill: it may not have trained, or have crashed"
    if held and row.memory_mib == held[-1].memory_mib:
        return "exactly as much as at a smaller batch: it may not have trained"
    if len(held) >= 2 and held[-2].batch_size < held[-1].batch_size:
        smaller, larger = held[-2:]
        slope = (larger.memory_mib - smaller.memory_mib) / (larger.batch_size - smaller.batch_size)
        expected = larger.memory_mib + slope * (row.batch_size - larger.batch_size)
        if expected > 0.98 * CARD_MIB and row.memory_mib < 0.98 * expected:
            return "smaller batches lead past the card: it may be the peak before a crash"
    falls = following is not None and following.memory_mib < row.memory_mib
    if falls and row.memory_mib < CARD_MIB / 2:
        return "more than at a larger batch"
    if falls and row.memory_mib > 0.95 * CARD_MIB:
        return "at the card's limit, and less at a larger batch: it may be the peak before a crash"
    return None


_FORMS: Mapping[str, tuple[frozenset[str], Callable[[str, list[dict[str, str]]], Iterator[PublishedRow]]]] = {
    "gpumemnet": (frozenset({"Filename", "Depth", "Total Parameters", "Max GPU Memory (MiB)"}), _read_gpumemnet),
    "timm": (frozenset({"model", "module", "batch_size", "max_gpu_memory_mib"}), _read_timm),
    "models": (frozenset({"model", "batch_size", "actual_mib"}), _read_models),
}
