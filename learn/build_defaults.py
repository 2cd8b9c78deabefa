"""`python -m learn.build_defaults`: fit the models that come with the project, on published measurements.

Start reading at `build`. It writes what `learn/default_models/` holds: one artifact a target, and a model card.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.cli.command_line import command
from conf.cli.settings import Checked, key
from conf.errors import UsageError

TARGETS = ("memory", "smact", "smocc")  # the targets of an estimate that the files have
LIMIT_MIB = 10.0
WHERE = "GPUMemNet's files come from https://github.com/itu-rad/GPUMemNet: clone it, then path=GPUMemNet/Datasets"
_METRICS = {
    "accuracy": "accuracy in the published bins",
    "macro_f1": "macro F1",
    "median_relative_error": "median relative error",
    "p90_relative_error": "90th percentile of the relative error",
    "mean_absolute_error": "mean absolute error",
    "underestimates": "share underestimated",
    "coverage": "labels under the 99 % bound",
    "bound_excess": "bound over label, median excess",
}

_OWN = """- **And on** {measured:,} runs that the farm measured (`datasets/README.md`). Rows by device: {devices}.
  What follows in this list is said of the published rows.
"""
_CARD = """# Model card: the models that come with the project

Estimators of one training job's peak GPU memory, SM activity (`smact`) and SM occupancy (`smocc`), used by
`learn.estimate` where you have fitted none of your own. Written by
`python -m learn.build_defaults`, which makes them anew.

- **Estimator**: `{estimator}` (`learn/estimators/hybrid.py`), seed {seed}.
- **Made with**: {environment}.
- **Features**: version `{feature_version}`.
- **Trained on**: published measurements of one A100-SXM4-40GB of a DGX Station A100, PyTorch 2.4.1,
  CUDA 12.2, fp32: GPUMemNet's sets (arXiv 2602.17817){timm}. No row of them comes along.
{own}- **Not measured**: other GPUs, half precision, other optimizers than Adam (timm: taken for SGD with
  momentum), `torch.compile`, several GPUs. Estimates for these carry warnings, the trace's
  figure, and a bound by causes.
- **Utilization** was measured on MLPs and CNNs only, means over a whole run with its input pipeline.
- `drama`, step time and power were in none of the files: the traced step's kernels answer for them.

## Rows

| target | rows by family | out of memory |
|---|---|---|
{rows}

## Held-out figures

30 % of the rows, whole groups of near-copies held out (3-fold mean in brackets).

| | {targets} |
|---|{rule}
{figures}

`learn.benchmark` says how they compare with published estimators, family by family.
"""


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Checked):
    """Files to build from. Raises `UsageError` that names every bad key together.

      git clone https://github.com/itu-rad/GPUMemNet
      python -m learn.build_defaults path=GPUMemNet/Datasets out=models

    `path` is your own copy of the published rows: GPUMemNet's CSV files (CC BY-NC 4.0) and, if you have one, a CSV file
    with the columns model, module, batch_size and max_gpu_memory_mib, which adds models of timm. The runs of datasets/
    count too. It takes some ten minutes on two cores, most of them to trace every job once; data= keeps the traces.
    What comes with the project is such a folder, copied into learn/default_models.
    """

    path: str = key(help="folder of published measurements", kind="path")
    out: str = key(help="folder to write, new or empty", kind="new path")
    data: str | None = key(
        None, "data folder for the rows, their features and the fits; default a temporary one", "new path"
    )
    seed: int = key(0, "of splits and fits", "int >= 0")

    def problems(self) -> Iterator[str]:
        if not Path(self.path).exists():
            yield f"path={self.path}: there is no such file or folder"
        out = Path(self.out)
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            yield f"out={out} is there already; name a new folder or an empty one"


def build(settings: BuildSettings, progress: Callable[[str, int, int], None]) -> None:
    """Import the published rows, fit every target on them, and write the models.

    They are made in a hidden folder beside their place, and renamed once they are whole.
    """
    home = Path(settings.out).resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="gpufarm-defaults-") as scratch,
        tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=home.parent) as aside,
    ):
        building, data = Path(aside) / "models", settings.data or scratch
        _ingest(settings.path, data)
        _fit(data, settings.seed, building, progress)
        size_mib = sum(path.stat().st_size for path in building.rglob("*") if path.is_file()) / 2**20
        if size_mib > LIMIT_MIB:
            raise UsageError(f"the models take {size_mib:.1f} MiB, more than the {LIMIT_MIB:g} MiB that come along")
        os.replace(building, home)


def _ingest(path: str, data: str) -> None:
    from warehouse.exchange.dataset import find_parts, repository_folder
    from warehouse.ingest import IngestSettings, ingest

    try:
        ingest(IngestSettings(source="gpumemnet", path=path, data=data))
    except UsageError as error:
        raise UsageError(f"{error}; {WHERE}") from error
    try:
        ingest(IngestSettings(source="timm", path=path, data=data))
    except UsageError as error:
        print(f"{error}: the trace answers for timm's models")
    if find_parts(repository_folder()):
        ingest(IngestSettings(source="dataset", path=str(repository_folder()), data=data))


def _fit(data: str, seed: int, folder: Path, progress: Callable[[str, int, int], None]) -> None:
    from learn.fitting.artifacts import stamped
    from learn.fitting.fit_call import FitSettings, fit

    metas = {}
    for target in TARGETS:
        # Several sources that are named are mixed: what differs between their runs is in the features, and the card
        # says how many there are of each.
        sources = ("imported", "measured")
        settings = FitSettings(target=target, estimator="hybrid", source=sources, seed=seed, data=data)
        done = fit(settings, progress=progress)
        shutil.copytree(done.path / "model", folder / target / "model")
        metas[target] = stamped(folder / target, done.meta, "meta.json")
        (folder / target / "meta.json").write_text(json.dumps(metas[target], indent=1, sort_keys=True))
    (folder / "MODEL_CARD.md").write_text(_card(metas))


def _card(metas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the model card; `metas` are the artifacts' `meta.json` by target."""
    first = next(iter(metas.values()))
    measured = first["rows"]["source"].get("measured", 0)
    rows = [
        f"| {target} | {_counted(meta['rows']['family'])} | {meta['rows']['censored']:,} |"
        for target, meta in metas.items()
    ]
    figures = [
        f"| {heading} | {' | '.join(_cell(name, meta) for meta in metas.values())} |"
        for name, heading in _METRICS.items()
    ]
    return _CARD.format(
        estimator=first["estimator"],
        seed=first["seed"],
        environment=", ".join(f"{name} {version}" for name, version in sorted(first["environment"].items()) if version),
        feature_version=first["feature_version"],
        timm=" and timm models" if any("timm" in meta["rows"]["family"] for meta in metas.values()) else "",
        own=_OWN.format(measured=measured, devices=_counted(first["rows"]["device"])) if measured else "",
        rows="\n".join(rows),
        targets=" | ".join(metas),
        rule="---|" * len(metas),
        figures="\n".join(figures),
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _cell(name: str, meta: Mapping[str, Any]) -> str:
    values = meta["metrics"].get(name)
    if values is None or values["test"] is None:
        return "–"
    if name == "mean_absolute_error":
        unit = "" if meta["unit"] == "ratio" else f" {meta['unit']}"
        digits = 4 if meta["unit"] == "ratio" else 0
        return f"{values['test']:.{digits}f}{unit}"
    cv = "" if values["cv_mean"] is None else f" ({values['cv_mean']:.1%})"
    return f"{values['test']:.1%}{cv}"


def entry(settings: BuildSettings) -> None:
    """Fit the models, and print the folder's path."""
    from conf.cli.command_line import StepBar

    with StepBar("default models") as bar:
        build(settings, bar.update)
    print(settings.out)


if __name__ == "__main__":
    command("build_defaults", entry)
