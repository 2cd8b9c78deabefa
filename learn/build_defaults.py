"""`python -m learn.build_defaults path=FOLDER`: fit the models that come with the project, on measurements.

Start reading at `build`. What it writes is `learn/default_models/`: one artifact a target, a model card. The models of
`method=fast` are fitted afterwards, to what these say: `python -m learn.config_models learn/default_models/fast`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from conf.cli import command
from conf.errors import UsageError
from conf.settings import key

TARGETS = ("memory", "smact", "smocc")  # of those that an estimate gives, what the files have
LIMIT_MIB = 10.0
REQUIRED_SOURCE, OPTIONAL_SOURCE = "gpumemnet", "timm"  # of published files; the second is published with no address
WHERE = "GPUMemNet's files come from https://github.com/itu-rad/GPUMemNet: clone it, then path=GPUMemNet/Datasets"
_CARD = "MODEL_CARD.md"  # what a folder of models is known by
_PATHS = ("path", "out", "data")


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What to build from. Raises `UsageError` that names every bad key together.

      python -m learn.build_defaults path=FOLDER

    FOLDER is your own copy of the published rows. GPUMemNet's CSV files (CC BY-NC 4.0) are required:

      git clone https://github.com/itu-rad/GPUMemNet
      python -m learn.build_defaults path=GPUMemNet/Datasets out=models

    A CSV file with the columns model, module, batch_size and max_gpu_memory_mib, anywhere in FOLDER, adds models of
    timm; without one, the trace answers for them. Everything else is computed. It takes some twenty minutes on two
    cores, most of it for tracing every configuration once; with data=, that is kept.
    """

    path: str = key(help="folder of published measurements", kind="path")
    out: str | None = key(
        None,
        "folder to write: a new or empty one, or one of models; default learn/default_models of this checkout",
        "new path",
    )
    data: str | None = key(
        None, "data folder for the imported rows and their features; default a temporary one", "new path"
    )
    datasets: bool | str = key(
        True,
        "fit on the runs of datasets/ as well, where it has any; false: not; or the folder of a data set",
        "bool | path",
    )
    seed: int = key(0, "of splits and fits", None)
    workers: int | None = key(None, "processes of Ray; default the number of CPUs; 0 works in this process", None)

    def __post_init__(self) -> None:
        problems = []
        named = isinstance(self.datasets, str) and Path(self.datasets).is_dir()
        if not named and not isinstance(self.datasets, bool):
            problems.append(f"datasets must be true, false or the folder of a data set, got {self.datasets!r}")
        for name, least in (("seed", 0), ("workers", 0)):
            value = getattr(self, name)
            if value is None and name == "workers":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                problems.append(f"{name} must be an integer >= {least}, got {value!r}")
        wrong = [name for name in _PATHS if not _names_a_path(getattr(self, name), needed=name == "path")]
        problems += [f"{name} must be a path, got {getattr(self, name)!r}" for name in wrong]
        if "path" not in wrong and not Path(self.path).exists():
            problems.append(f"path={self.path}: there is no such file or folder")
        if "out" not in wrong:
            problems += _problems_of_home(self.home)
            problems += [
                f"{name}={getattr(self, name)} is inside {self.home}, which is written anew: name another out="
                for name in ("path", "data")
                if name not in wrong and getattr(self, name) and _real(getattr(self, name)).is_relative_to(self.home)
            ]
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def dataset(self) -> Path | None:
        """The data set whose runs are fitted on, too; None where it holds none, or they are not wanted."""
        from warehouse.dataset import find_parts, repository_folder

        if self.datasets is False:
            return None
        root = repository_folder() if self.datasets is True else Path(self.datasets)
        return root if find_parts(root) else None

    @property
    def home(self) -> Path:
        """The folder that is written: absolute, links followed, so that a link to it stays one."""
        from learn.artifacts import DEFAULT_MODELS

        return _real(DEFAULT_MODELS if self.out is None else self.out)


def _names_a_path(value, needed: bool) -> bool:
    return not needed if value is None else isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _real(path: str | os.PathLike) -> Path:
    return Path(os.path.realpath(path))


def _problems_of_home(home: Path) -> list[str]:
    """Why this folder may not be written anew: it is somebody's, or there can't be one."""
    there = next(path for path in (home, *home.parents) if path.exists())
    if not there.is_dir():
        return [f"out={home}: {there} is a file; name a folder"]
    if there != home:
        return []
    if os.path.ismount(home):
        return [f"out={home} is a mount point; name a folder in it"]
    if any(home.iterdir()) and not (home / _CARD).is_file():
        return [f"out={home} holds other files than models (no {_CARD}); name a folder that is new, empty or of models"]
    return []


def build(settings: BuildSettings, *, progress: Callable[[str, int, int], None]) -> Path:
    """Ingest, compute features and fit every target; the folder that was written.

    `progress(step, done, of)` hears of what takes long. The folder appears whole, in place of the one before; where
    the build fails, that one stays, and nothing else is left.
    """
    home = settings.home
    made = [folder for folder in home.parents if not folder.exists()]
    building = None
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            with _held(home.parent):
                _sweep(home)
                building = Path(tempfile.mkdtemp(prefix=_prefix(home, "build"), dir=home.parent))
                held.enter_context(_held(building))
            with tempfile.TemporaryDirectory(prefix="gpufarm-defaults-") as scratch:
                _fit_all(settings, Path(settings.data or scratch), building, progress)
            size_mib = sum(path.stat().st_size for path in building.rglob("*") if path.is_file()) / 2**20
            if size_mib > LIMIT_MIB:
                raise UsageError(f"the models take {size_mib:.1f} MiB, more than the {LIMIT_MIB:g} MiB that come along")
            os.chmod(building, 0o755)
            _put_in_place(building, home)
    except BaseException:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
        for folder in made:  # innermost first; one that holds something by now stays
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return home if settings.out is None else Path(settings.out)


def _prefix(home: Path, stage: str) -> str:
    """Of the hidden folders beside `home`: `build`, models that are being made; `old`, those that they replace."""
    return f".{home.name}-{stage}-"


@contextlib.contextmanager
def _held(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a folder against other builds; False: another holds it, or it can't be held here. The kernel lets go of it
    however this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:  # also a file system without locks
            held = False
        yield held
    finally:
        os.close(descriptor)


def _sweep(home: Path) -> None:
    """Remove what killed builds left beside `home`; models that one had put aside come back if there are no others."""
    prefixes = _prefix(home, "build"), _prefix(home, "old")
    for left in sorted(path for path in home.parent.iterdir() if path.name.startswith(prefixes)):
        if left.is_symlink() or not left.is_dir() or not os.access(left, os.R_OK | os.W_OK):
            continue
        with _held(left, wait=False) as dead:
            if dead and left.name.startswith(prefixes[1]) and not home.exists():
                os.replace(left, home)
            elif dead:
                shutil.rmtree(left, ignore_errors=True)


def _put_in_place(building: Path, home: Path) -> None:
    """`building` becomes `home`. The models before it are moved aside, and back again where that fails."""
    aside = home.parent / building.name.replace(_prefix(home, "build"), _prefix(home, "old"), 1)
    with _held(home.parent):
        if problems := _problems_of_home(home):  # the build took its time
            raise UsageError("; ".join(problems))
        try:
            if home.exists():
                _move(home, aside)
            os.replace(building, home)
        except BaseException:
            if aside.exists() and not home.exists():
                os.replace(aside, home)
            raise
    shutil.rmtree(aside, ignore_errors=True)


def _move(folder: Path, to: Path) -> None:
    try:
        os.replace(folder, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(folder, to)  # a container's file system renames no folder that its image has
        shutil.rmtree(folder)


def _fit_all(settings: BuildSettings, data: Path, folder: Path, progress) -> None:
    from learn.artifact_files import stamped
    from learn.artifacts import described
    from learn.data import load_rows
    from learn.estimators import make_estimator
    from learn.evaluation.evaluate import evaluate
    from learn.model_card import write_card
    from learn.step_store import StepStore
    from learn.suspect_rows import with_suspects
    from learn.targets import make_bins
    from warehouse.ingest import IngestSettings, ingest

    ingest_published(settings.path, data)
    # Both are named, so the mixture is no accident: what differs between the two kinds of runs is in their features
    # (the device's description, and `net_training_loop` of others' loops, which feed every step), near-copies in both
    # stay on one side of a split, and the card says how many there are of each.
    sources = ["imported"]
    if settings.dataset is not None:
        ingest(IngestSettings(source="dataset", path=str(settings.dataset), data=str(data)))
        sources.append("measured")
    name = "hybrid"
    metas = {}
    steps = StepStore(data)
    for target in TARGETS:
        rows = load_rows(str(data), target, source=sources)
        steps.prepare(rows.cases, workers=settings.workers, progress=lambda d, n: progress("tracing jobs", d, n))
        rows = with_suspects(rows, steps)
        bins = make_bins(rows.target, rows.exact.label, rows.family.tolist(), ceiling_mib=rows.ceiling_mib)
        progress(f"fitting {target}", 0, 1)
        evaluation = evaluate(name, rows, bins, settings.seed, steps=steps)
        fitted = make_estimator(name, settings.seed).fit(rows, steps)
        metas[target] = {
            **described(name, rows, evaluation, bins, settings.seed, datetime.now(UTC)),
            "recall": evaluation.test.recall,
        }
        (folder / target / "model").mkdir(parents=True)
        fitted.save(folder / target / "model")
        stamp = stamped(folder / target, metas[target], "meta.json")
        (folder / target / "meta.json").write_text(json.dumps(stamp, indent=1, sort_keys=True))
        progress(f"fitting {target}", 1, 1)
    write_card(folder / _CARD, metas)


def ingest_published(path: str, data: Path) -> None:
    """Land the published rows of a user's own copy: GPUMemNet's, and those of timm's models where there are any.

    Raises `UsageError` that says where they are to be had, for a path without a file of GPUMemNet's.
    """
    from warehouse.ingest import IngestSettings, ingest

    sources = published_sources(path)
    if REQUIRED_SOURCE not in sources:
        raise UsageError(f"path={path} holds no file of source={REQUIRED_SOURCE}; {WHERE}")
    for source in (REQUIRED_SOURCE, OPTIONAL_SOURCE):
        if source in sources:
            ingest(IngestSettings(source=source, path=path, data=str(data)))


def published_sources(path: str) -> frozenset[str]:
    """Return the sources whose files a path holds, by their headers: a CSV file, or a folder and what is below it."""
    from warehouse.published import read_recognised

    root = Path(path).expanduser()
    paths = [root] if root.is_file() else [one for one in root.rglob("*") if one.suffix.lower() == ".csv"]
    files = [read_recognised(one) for one in paths if one.is_file()]
    return frozenset(file.form for file in files if file is not None)


def entry(settings: BuildSettings) -> int:
    """The command: settings in, a progress bar, the folder's path out."""
    from rich.console import Console
    from rich.progress import TimeRemainingColumn

    from conf.bars import start_bar

    console = Console(stderr=True, highlight=False)
    if OPTIONAL_SOURCE not in published_sources(settings.path):
        console.print(f"path={settings.path} holds no rows of timm's models: the trace answers for these", markup=False)
    bar, task = start_bar(console, "default models", TimeRemainingColumn())
    try:

        def progress(step: str, done: int, of: int) -> None:
            bar.update(task, description=step, completed=done, total=of)

        written = build(settings, progress=progress)
    finally:
        bar.stop()
    print(written)
    return 0


if __name__ == "__main__":
    command("build_defaults", entry)
