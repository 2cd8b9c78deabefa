"""`python -m learn.build_defaults`: fit the models that come with the project, on published measurements.

Start reading at `build`, which writes what `learn/default_models/` holds: models, those of `method=fast`, and a card.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.cli.command_line import StepBar, command
from conf.cli.settings import Checked, key
from conf.errors import UsageError
from conf.files.outputs import new_folder
from learn.commands.fit import FitSettings, fit
from learn.estimation.fast_estimates import FAST_LOOPS
from learn.estimators.protocol import Estimator
from learn.fitting.artifacts import BOUND, DEFAULT_MODELS, default_artifact, open_artifact, write_model
from learn.fitting.config_models import drawn_cases, fit_config_model, labelled_rows
from learn.judging.report import model_card
from learn.rows.step_store import StepStore

TARGETS = ("memory", "smact", "smocc")  # the targets of an estimate that the files have
WHERE = "GPUMemNet's files come from https://github.com/itu-rad/GPUMemNet: clone it, then path=GPUMemNet/Datasets"
CASES = 3360  # sampled configurations that method=fast learns from
CARD = DEFAULT_MODELS / "MODEL_CARD.md"  # a build fills in its facts
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


def entry(settings: BuildSettings) -> None:
    """Fit the models, and print the folder's path."""
    with StepBar("default models") as bar:
        build(settings, bar.update)
    print(settings.out)


if __name__ == "__main__":
    command("build_defaults", entry)
