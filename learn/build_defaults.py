"""`python -m learn.build_defaults`: fit the models that come with the project, on published measurements.

Start reading at `build`, which writes what `learn/default_models/` holds: models, those of `method=fast`, and a card.
Those of `method=fast` learn from configurations alone what full estimates say: `drawn_cases` samples, `labelled_rows`
labels what was traced with the figures of a target's model, or of the trace, and `fit_config_model` fits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from featurize.configs.features import group_key
from featurize.configs.space import parse_space
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import DEFAULT_DEVICE
from featurize.job.training_settings import FITTED_OPTIMIZERS, PRECISIONS
from learn.commands.fit import FitSettings, fit
from learn.estimation.fast_estimates import FAST_LOOPS
from learn.estimators.protocol import LEVEL, Estimator, conformal_score, records_of
from learn.estimators.tabular import LightGBMEstimator
from learn.fitting.artifacts import BOUND, DEFAULT_MODELS, default_artifact, meta_of_fit, open_artifact, write_model
from learn.job.training_job import Case
from learn.judging.evaluate import hold_out
from learn.judging.report import model_card
from learn.judging.scores import errors_of
from learn.rows.data import LabelledRow, Rows, get_target, module_of
from learn.rows.step_store import StepStore

TARGETS = ("memory", "smact", "smocc")  # the targets of an estimate that the files have
WHERE = "GPUMemNet's files come from https://github.com/itu-rad/GPUMemNet: clone it, then path=GPUMemNet/Datasets"
CASES = 3360  # sampled configurations that method=fast learns from
CARD = DEFAULT_MODELS / "MODEL_CARD.md"  # a build fills in its facts
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
Progress = Callable[[str, int, int], None]  # called with the step's name, the number done, and the total


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
        if self.path is None and (lacking := [target for target in TARGETS if default_artifact(target) is None]):
            yield f"no models of {', '.join(lacking)} are packaged, so path= is needed; {WHERE}"
        elif self.path is not None and not Path(self.path).exists():
            yield f"path={self.path}: there is no such file or folder"
        if (out := Path(self.out)).exists() and not (out.is_dir() and not any(out.iterdir())):
            yield f"out={out} is there already; name a new folder or an empty one"


def build(settings: BuildSettings, progress: Progress) -> None:
    """Write the targets' models, if there are published rows, and those of `method=fast`, fitted to what these or the
    packaged ones say of sampled configurations, each traced once (0.1 to 0.3 s). Their folder appears whole or not at
    all. Raises `UsageError` where files are missing, or too few configurations of a family could be traced."""
    home, seed = Path(settings.out).resolve(), settings.seed
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpufarm-defaults-") as scratch, new_folder(home) as building:
        data = settings.data or scratch
        if settings.path is not None:
            models = fit_published(building, settings.path, seed, data, progress)
        else:
            models = {name: packaged.estimator for name in TARGETS if (packaged := default_artifact(name)) is not None}
        steps, cases = StepStore(data), drawn_cases(CASES, seed)
        steps.prepare(cases, progress=lambda done, total: progress("tracing", done, total))
        for name, rows in labelled_rows(cases, steps, models, (*FAST_LOOPS, BOUND)).items():
            progress(f"fitting {name} of configurations", 0, 1)
            estimator, meta = fit_config_model(name, rows, seed)
            write_model(building / "fast" / name, estimator, {**meta, "loop": FAST_LOOPS[rows.target.name]})


def fit_published(folder: Path, path: str, seed: int, data: str, progress: Progress) -> dict[str, Estimator]:
    """Import published rows and the runs of datasets/, write each target's model and the card; return the models."""
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
    metas, models = {}, {}
    for target in TARGETS:
        sources = ("imported", "measured")  # named, they are mixed: what differs between their runs is in the features
        settings = FitSettings(target=target, estimator="hybrid", source=sources, seed=seed, data=data)
        fitted = fit(settings, progress=progress)
        models[target] = open_artifact(fitted.path).estimator
        metas[target] = write_model(folder / target, models[target], fitted.meta)
    (folder / CARD.name).write_text(model_card(metas, CARD.read_text()))
    return models


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


def labelled_rows(
    cases: Sequence[Case], steps: StepStore, models: Mapping[str, Estimator], names: Iterable[str]
) -> dict[str, Rows]:
    """Return name -> rows, labelled with the figures of the models and of the trace. Cases that cannot be traced are
    left out.

    Args:
        cases: Cases to label.
        steps: Store of their traced steps.
        models: Target -> its estimator.
        names: Targets, and `BOUND` for memory's 99 % bound. Raises `KeyError` for one that has no labels.
    """
    records, _ = records_of(cases, steps)
    traced = [cases[place] for place in records]
    labels = _without_input([record.values for record in records.values()])
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
        for name in names
    }


def _without_input(records: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """target -> the trace's DRAM activity and step time in ms, as in the farm's own trials: a step of the usual loop
    runs the same kernels, and waits for its input before."""
    names = ("job_step_time_ms", "job_input_share", "job_priced_drama")
    step_ms, input_share, drama = np.array([[values[name] for name in names] for values in records]).T
    return {"drama": np.minimum(drama / (1 - input_share), 1.0), "step_time": step_ms * (1 - input_share)}


def fit_config_model(name: str, rows: Rows, seed: int) -> tuple[LightGBMEstimator, dict[str, Any]]:
    """Fit a target's model, or `BOUND`'s, to all rows; return it with its `meta.json`.

    Its errors, and the `above` by which the bound exceeds its own figure, are of a fit without the groups judged.
    Raises `UsageError` for rows of which a family's are too few to hold some out.
    """

    def fitted(known: Rows) -> LightGBMEstimator:
        estimator = LightGBMEstimator(seed)
        estimator.rounds, estimator.times_rough = ROUNDS, True
        return estimator.fit(known)

    train, test = map(rows.subset, hold_out(rows, np.unique(rows.family, return_inverse=True)[1], seed))
    if lacking := [family for family in FAMILIES if family not in test.family]:
        raise UsageError(f"no rows of {', '.join(lacking)} are held out, so the errors of {name} are unknown")
    point = fitted(train).predict(test.cases).point
    of_family = {family: test.family == family for family in FAMILIES}
    estimator = fitted(rows)
    meta: dict[str, Any] = {
        **meta_of_fit(estimator, rows, seed, datetime.now(UTC), test=len(test)),
        "errors": {
            family: _median_and_p90(test.label[mask], point[mask], rows.target.space)
            for family, mask in of_family.items()
        },
        "known": {family: _known(rows.subset(rows.family == family).configs) for family in FAMILIES},
    }
    if name == BOUND:
        times = test.label / point
        meta["above"] = {
            family: round(conformal_score(np.sort(times[mask]), LEVEL), 4) for family, mask in of_family.items()
        }
    return estimator, meta


def _median_and_p90(label: np.ndarray, estimate: np.ndarray, space: str) -> dict[str, float]:
    errors = errors_of(label, estimate, space)
    assert errors.median is not None and errors.p90 is not None, "each family has rows held out"
    return {"median": round(errors.median, 4), "p90": round(errors.p90, 4)}


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
