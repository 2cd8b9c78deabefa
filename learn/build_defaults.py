"""`python -m learn.build_defaults`: fit the models that come with the project, on published measurements.

Start reading at `build`. It writes what `learn/default_models/` holds: one artifact a target, those of `method=fast`,
and a model card.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.cli.command_line import StepBar, command
from conf.cli.settings import Checked, key
from conf.errors import UsageError
from conf.files.outputs import new_folder

if TYPE_CHECKING:
    from learn.estimators.protocol import Estimator

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
    from learn.estimation import fast_estimates

    home = Path(settings.out).resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpufarm-defaults-") as scratch, new_folder(home) as building:
        data = settings.data or scratch
        if settings.path is None:
            models = _packaged()
        else:
            _ingest(settings.path, data)
            models = _fit(data, settings.seed, building, progress)
        fast_estimates.fit_config_models(
            building / "fast", models, cases=fast_estimates.CASES, seed=settings.seed, data=data, progress=progress
        )
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
    from learn.fitting.artifacts import default_artifact

    packaged = [(target, default_artifact(target)) for target in TARGETS]
    if lacking := [target for target, artifact in packaged if artifact is None]:
        raise UsageError(f"no model of {', '.join(lacking)} is packaged, so path= is needed; {WHERE}")
    return {target: artifact.estimator for target, artifact in packaged if artifact is not None}


def _fit(data: str, seed: int, folder: Path, progress: Callable[[str, int, int], None]) -> dict[str, Estimator]:
    """Write an artifact for each target, and the model card; return target -> its estimator."""
    from learn.commands.fit import FitSettings, fit
    from learn.fitting.artifacts import open_artifact, stamped
    from learn.judging.report import model_card

    metas, models = {}, {}
    for target in TARGETS:
        # Sources that are named are mixed: what differs between their runs is in the features.
        sources = ("imported", "measured")
        settings = FitSettings(target=target, estimator="hybrid", source=sources, seed=seed, data=data)
        fitted = fit(settings, progress=progress)
        models[target] = open_artifact(fitted.path).estimator
        shutil.copytree(fitted.path / "model", folder / target / "model")
        metas[target] = stamped(folder / target, fitted.meta, "meta.json")
        (folder / target / "meta.json").write_text(json.dumps(metas[target], indent=1, sort_keys=True))
    (folder / CARD.name).write_text(model_card(metas, CARD.read_text()))
    return models


def entry(settings: BuildSettings) -> None:
    """Fit the models, and print the folder's path."""
    with StepBar("default models") as bar:
        build(settings, bar.update)
    print(settings.out)


if __name__ == "__main__":
    command("build_defaults", entry)
