"""`python -m learn.build_defaults`: fit the models that come with the project, on published measurements.

Start reading at `build`. It writes what `learn/default_models/` holds: one artifact a target, those of `method=fast`,
and a model card. The latter's rows are sampled configurations (`drawn_cases`), labelled with the figures of a full
estimate (`rows_of`): of a target's model, and of the trace where there is none.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from conf.cli.command_line import StepBar, command
from conf.cli.settings import Checked, key
from conf.errors import UsageError
from conf.files.outputs import new_folder
from featurize.configs.dimensions import Space, default_space
from featurize.configs.draws import Limits, sample_range
from featurize.configs.features import FEATURES_STAMP, group_key
from featurize.configs.space import parse_space
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import DEFAULT_DEVICE
from featurize.job.training_settings import FITTED_OPTIMIZERS, PRECISIONS
from learn.commands.fit import FitSettings, fit
from learn.estimation.fast_estimates import BOUND, FAST_LOOPS
from learn.estimators.protocol import LEVEL, OF_CONFIGS, Estimator, conformal_score
from learn.estimators.tabular import LightGBMEstimator
from learn.fitting.artifacts import FORMAT, add_checksums, default_artifact, environment, open_artifact
from learn.job.training_job import Case
from learn.judging.evaluate import hold_out
from learn.judging.report import model_card
from learn.rows.data import LabelledRow, Rows, get_target, module_of
from learn.rows.step_store import StepStore

TARGETS = ("memory", "smact", "smocc")  # the targets of an estimate that the files have
LIMIT_MIB = 10.0
WHERE = "GPUMemNet's files come from https://github.com/itu-rad/GPUMemNet: clone it, then path=GPUMemNet/Datasets"
CARD = Path(__file__).parent / "default_models" / "MODEL_CARD.md"  # a build fills in its facts


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Checked):
    """Files to build from. Raises `UsageError` that names every bad key together.

      git clone https://github.com/itu-rad/GPUMemNet
      python -m learn.build_defaults path=GPUMemNet/Datasets out=models
      python -m learn.build_defaults out=models    # those of method=fast alone, fitted to the packaged ones

    `path` is your own copy of the published rows: GPUMemNet's CSV files (CC BY-NC 4.0) and, if you have one, a CSV file
    with the columns model, module, batch_size and max_gpu_memory_mib, which adds models of timm. The runs of datasets/
    count too. Most of the time goes to traces, of every published job and of the configurations that method=fast learns
    from; data= keeps them. What comes with the project is such a folder, copied into learn/default_models.
    """

    path: str | None = key(None, "folder of published measurements; default none: only models of method=fast", "path")
    out: str = key(help="folder to write, new or empty", kind="new path")
    data: str | None = key(
        None, "data folder for the rows, their features and the fits; default a temporary one", "new path"
    )
    seed: int = key(0, "seed of splits and fits", "int >= 0")

    def problems(self) -> Iterator[str]:
        if self.path is not None and not Path(self.path).exists():
            yield f"path={self.path}: there is no such file or folder"
        out = Path(self.out)
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            yield f"out={out} is there already; name a new folder or an empty one"


def build(settings: BuildSettings, progress: Callable[[str, int, int], None]) -> None:
    """Import the published rows, fit every target on them, and write the models; without rows, those of `method=fast`
    alone, fitted to the packaged models.

    Their folder appears whole or not at all. Raises `UsageError` where files or packaged models are missing, or the
    models are too large.
    """
    home = Path(settings.out).resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpufarm-defaults-") as scratch, new_folder(home) as building:
        data = settings.data or scratch
        if settings.path is None:
            models = _packaged()
        else:
            _ingest(settings.path, data)
            models = _fit(data, settings.seed, building, progress)
        fit_fast(building / "fast", models, settings.seed, data, progress)
        size_mib = sum(path.stat().st_size for path in building.rglob("*") if path.is_file()) / 2**20
        if size_mib > LIMIT_MIB:
            raise UsageError(f"the models take {size_mib:.1f} MiB, more than the {LIMIT_MIB:g} MiB that are packaged")


def _ingest(path: str, data: str) -> None:
    from warehouse.exchange.dataset import find_parts, repository_folder
    from warehouse.exchange.ingesting import IngestSettings, ingest

    try:
        ingest(IngestSettings(source="gpumemnet", path=path, data=data))
    except UsageError as error:
        raise UsageError(f"{error}; {WHERE}") from error
    try:
        ingest(IngestSettings(source="timm", path=path, data=data))
    except UsageError as error:
        print(f"{error}: the models are fitted without it")
    if find_parts(repository_folder()):
        ingest(IngestSettings(source="dataset", path=str(repository_folder()), data=data))


def _packaged() -> dict[str, Estimator]:
    packaged = [(target, default_artifact(target)) for target in TARGETS]
    if lacking := [target for target, artifact in packaged if artifact is None]:
        raise UsageError(f"no model of {', '.join(lacking)} is packaged, so path= is needed; {WHERE}")
    return {target: artifact.estimator for target, artifact in packaged if artifact is not None}


def _fit(data: str, seed: int, folder: Path, progress: Callable[[str, int, int], None]) -> dict[str, Estimator]:
    """Write an artifact for each target, and the model card; return target -> its estimator."""
    metas, models = {}, {}
    for target in TARGETS:
        # Sources that are named are mixed: what differs between their runs is in the features.
        sources = ("imported", "measured")
        settings = FitSettings(target=target, estimator="hybrid", source=sources, seed=seed, data=data)
        fitted = fit(settings, progress=progress)
        models[target] = open_artifact(fitted.path).estimator
        shutil.copytree(fitted.path / "model", folder / target / "model")
        metas[target] = add_checksums(folder / target, fitted.meta, "meta.json")
        (folder / target / "meta.json").write_text(json.dumps(metas[target], indent=1, sort_keys=True))
    (folder / CARD.name).write_text(model_card(metas, CARD.read_text()))
    return models


FAMILIES = ("cnn", "mlp", "transformer")
# GPU models of the sampled configurations: more would spread them thinner.
DEVICES = (
    "A100-SXM4-40GB",
    "B200-SXM-180GB",
    "H100-SXM5-80GB",
    "H200-SXM-141GB",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "T4",
    "V100-SXM2-32GB",
)
CASES = 3360
ROUNDS = 120  # trees of a model; all those of method=fast take less than 1.5 MB
MOST_MIB = 120 * 1024  # limit of `featurize.job.layers.rough_memory_mib` in the wider spaces
# Instead of what conf/arch says: a scheduler's jobs differ more in how they are trained than a published sweep does. A
# value listed twice is drawn twice as often.
_WIDER: Mapping[str, Any] = {
    "batch_size": {"low": 1, "high": 1024},
    "optimizer": ["adam", *FITTED_OPTIMIZERS],
    "precision": ["fp32", "fp32", *PRECISIONS],
    "activation_checkpointing": [False, False, False, True],
    "cudnn_benchmark": [False, False, False, True],
    "channels_last": [False, False, False, True],
    "softmax": [False, True],
    "use_dropout": [False, True],
    "growth_rate": {"low": 12, "high": 64},
}


def fit_fast(
    folder: Path, models: Mapping[str, Estimator], seed: int, data: str, progress: Callable[[str, int, int], None]
) -> None:
    """Write one artifact a target, and one of the memory bound, into `folder`; each configuration is traced once, in
    0.1 to 0.3 s.

    Args:
        folder: Where a folder is made for each artifact.
        models: Target -> its estimator; memory's has a bound.
        seed: Seed of the configurations, splits and fits.
        data: Data folder that keeps the traced steps.
        progress: Is called with a step's name, what is done and the total.
    """
    steps, cases = StepStore(data), drawn_cases(CASES, seed)
    steps.prepare(cases, progress=lambda completed, total: progress("tracing", completed, total))
    for name, rows in rows_of(cases, steps, models).items():
        progress(f"fitting {name} of configurations", 0, 1)
        _write_fast(folder / name, name, rows, seed)


def drawn_cases(n: int, seed: int) -> tuple[Case, ...]:
    """Return about n cases in the usual training loop, as many of each family: half from its own space, half from wider
    ones; half on the measured GPU model, the others in turn."""
    others = [name for name in DEVICES if name != DEFAULT_DEVICE]
    each = -(-n // len(FAMILIES) // 4)
    cases = []
    for family in FAMILIES:
        own, *wider = _spaces(family)
        drawn = [*sample_range(own, seed, 0, 2 * each)]
        for space in wider:
            drawn += sample_range(space, seed, 0, each, limits=Limits(max_memory_mib=MOST_MIB))
        for place, config in enumerate(drawn):
            cases.append(Case(config, others[place // 2 % len(others)] if place % 2 else DEFAULT_DEVICE, True))
    return tuple(cases)


def _spaces(family: str) -> Iterator[Space]:
    """Yield the family's own search space, and a wider one: drawn evenly, and on a logarithmic scale."""
    own = default_space(family) or {}
    yield parse_space(family, own)
    wider = {name: _WIDER.get(name, spec) for name, spec in own.items()}
    for scale in ("uniform", "log"):
        scaled = {name: {**spec, "scale": scale} if isinstance(spec, dict) else spec for name, spec in wider.items()}
        yield parse_space(family, scaled)


def rows_of(cases: Sequence[Case], steps: StepStore, models: Mapping[str, Estimator]) -> dict[str, Rows]:
    """Return target -> rows, labelled with the figures of the models and of the trace. Cases that cannot be traced are
    left out."""
    traced = [case for case in cases if steps.record(case).error is None]
    labels = _without_input([steps.record(case).values for case in traced])
    for target, model in models.items():
        prediction = model.predict(traced, steps)
        labels[target] = prediction.point
        if target == "memory" and (upper := prediction.upper(LEVEL)) is not None:
            labels[BOUND] = upper

    def row(place: int, label: float) -> LabelledRow:
        case = traced[place]
        assert case.config is not None and case.spec is not None, "it was drawn, on a GPU model of conf/device"
        return LabelledRow(
            run_id=f"row-{place:06d}",
            case=case,
            label=label,
            family=case.family,
            source="simulated",
            device=case.device,
            device_memory_mib=case.spec.memory_mib,
            card_mib=case.spec.memory_mib,
            group=group_key(case.config),
            module=module_of(case.config),
        )

    return {
        name: Rows(
            get_target("memory" if name == BOUND else name),
            tuple(row(place, label) for place, label in enumerate(labels[name].tolist()) if np.isfinite(label)),
        )
        for name in (*FAST_LOOPS, BOUND)
    }


def _without_input(records: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """target -> the trace's DRAM activity and step time in ms, as in the farm's own trials: a step of the usual loop
    runs the same kernels, and waits for its input before."""
    names = ("job_step_time_ms", "job_input_share", "job_priced_drama")
    step_ms, input_share, drama = np.array([[values[name] for name in names] for values in records]).T
    return {"drama": np.minimum(drama / (1 - input_share), 1.0), "step_time": step_ms * (1 - input_share)}


def _write_fast(folder: Path, name: str, rows: Rows, seed: int) -> None:
    """Fit, judge on held-out groups, fit on all rows, and write the artifact."""

    def fitted(known: Rows) -> LightGBMEstimator:
        estimator = LightGBMEstimator(seed)
        estimator.rounds, estimator.times_rough = ROUNDS, True
        return estimator.fit(known)

    train, test = map(rows.subset, hold_out(rows, np.unique(rows.family, return_inverse=True)[1], seed))
    point = fitted(train).predict(test.cases).point
    off = np.abs(point - test.label) / (1.0 if rows.target.space == "ratio" else test.label)
    meta: dict[str, Any] = {
        "format": FORMAT,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": rows.target.name,
        "unit": rows.target.unit,
        "estimator": OF_CONFIGS,
        "feature_version": FEATURES_STAMP,
        "data_fingerprint": rows.fingerprint(),
        "environment": environment(),
        "rows": {
            "fitted": len(rows),
            "test": len(test),
            **{column: rows.count(column) for column in ("family", "source", "device")},
        },
        "seed": seed,
        "loop": FAST_LOOPS["memory" if name == BOUND else name],
        "errors": {family: _quantiles(off[test.family == family]) for family in FAMILIES},
        "known": {family: _known(rows.subset(rows.family == family).configs) for family in FAMILIES},
    }
    if name == BOUND:
        times = test.label / point
        meta["above"] = {
            family: round(conformal_score(np.sort(times[test.family == family]), LEVEL), 4) for family in FAMILIES
        }
    (folder / "model").mkdir(parents=True)
    fitted(rows).save(folder / "model")
    (folder / "meta.json").write_text(json.dumps(add_checksums(folder, meta, "meta.json"), indent=1, sort_keys=True))


def _quantiles(off: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.quantile(off, q)), 4) for name, q in (("median", 0.5), ("p90", 0.9))}


def _known(configs: Sequence[TrialConfig | None]) -> dict[str, list[Any]]:
    """Return field -> the least and the greatest number, or all words, of one family's configurations."""
    mappings = [config.to_mapping() for config in configs if config is not None]
    known: dict[str, list[Any]] = {}
    for name in sorted(mappings[0].keys() - {"family"}):
        values = [mapping[name] for mapping in mappings]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        known[name] = [min(values), max(values)] if numbers else sorted(set(values), key=str)
    return known


def entry(settings: BuildSettings) -> None:
    """Fit the models, and print the folder's path."""
    with StepBar("default models") as bar:
        build(settings, bar.update)
    print(settings.out)


if __name__ == "__main__":
    command("build_defaults", entry)
