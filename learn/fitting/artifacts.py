"""Fitted models on disk: `models/TARGET/VERSION/` holds the model, `meta.json`, `report.json`, plots and a README.

Start reading at `save_artifact` and `newest`. A version appears in one step, and is never changed. A damaged one
(`verify_files`) is reported in one line, and the next older version takes its place.

The artifact's JSON (`meta.json`) has the key `"files"`: `{relative path: {"sha256": hex, "bytes": n}}` for every
other file of the version, and `"own_sha256"`, of the JSON itself without that key, as `json.dumps(...,
sort_keys=True, separators=(",", ":"))` writes it. A version can be verified with a JSON parser and a SHA-256.

Refused before anything is parsed: a named file that is missing or has another size or content; a file below `model/`
that the JSON does not name (others are ignored: nothing reads them); links that lead out of the version's folder; what
is larger than `MOST_BYTES`, or unpacks to more than `MOST_UNPACKED_BYTES`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from conf.errors import EnvironmentProblem
from conf.files.identity import OWN_SHA256, own_sha256, sha256_of, version_of
from featurize.configs.features import FEATURES_STAMP, is_current
from featurize.configs.trial import printable
from featurize.device.device_spec import same_device
from learn.estimators.protocol import ESTIMATORS, PREFERRED, TRAINING_FREE, Estimator, get_estimator
from learn.job.training_job import loop_of_source
from learn.rows.data import Rows, get_target
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from learn.judging.evaluate import Evaluation


FILES = "files"
MODEL = "model"  # folder of the files that `Estimator.load` reads
MOST_BYTES, MOST_UNPACKED_BYTES = 2**28, 2**30  # others may have written the folder
_verified: dict[tuple[Any, ...], str | None] = {}  # (path, size, time, ...) of every file -> its problem
_reported: set[str] = set()


class DamagedArtifact(EnvironmentProblem):
    """A version whose files differ from the written ones; the message names it and the problem."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Decision of one cycle on one target's model. Every field has a default, since older journals may lack it.

    decision   first: there was no model; promoted: the candidate is now current; kept: the current one stays;
               skipped: nothing to fit on; failed: the estimator raised. `why` is the reason as a sentence
    current    version that was current before; candidate: the written version, or None
    held_out   rows of the decision: always held out, and not seen by the current model either
    figures    `current` and `candidate`: the result of `figures`, or None. They are of the rows of the decision;
               without a comparison, the candidate's on all held-out rows
    source, device_name   as requested
    """

    target: str = ""
    estimator: str = ""
    decision: str = ""
    why: str = ""
    current: str | None = None
    candidate: str | None = None
    held_out: int | None = 0
    figures: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    source: str | None = None
    device_name: str | None = None

    @property
    def in_use(self) -> Mapping[str, Any] | None:
        """Return the figures of the model that the decision left in use, if there is one."""
        return self.figures.get("candidate" if self.decision in ("promoted", "first") else "current")


def add_checksums(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `meta` with the checksums of all files of the folder except `meta.json`, and with its own checksum."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / "meta.json"
    }
    stamped: dict[str, Any] = json.loads(json.dumps({**meta, FILES: files}))  # as a reader gets it
    return {**stamped, OWN_SHA256: own_sha256(stamped)}


def read_json(path: Path) -> dict[str, Any]:
    """Return the artifact's JSON, its own checksum verified. Raises `DamagedArtifact`."""
    try:
        with path.open("rb") as file:
            described = json.loads(file.read(MOST_BYTES))
        if not isinstance(described, dict):
            raise DamagedArtifact(f"{_show(path)} is not a JSON object")
        checksum = own_sha256(described)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedArtifact(f"{_show(path)} cannot be read: {printable(str(error))}") from error
    if described.get(OWN_SHA256) != checksum:
        raise DamagedArtifact(f"{_show(path)} is not what was written: its checksum is another")
    return described


def verify_files(folder: Path, meta: Mapping[str, Any]) -> None:
    """Verify a version's files before anything parses them. Raises `DamagedArtifact`.

    Unchanged files are not read again.
    """
    named = meta.get(FILES)
    if not isinstance(named, Mapping):
        raise DamagedArtifact(f"{_show(folder)} is damaged: meta.json names no files with their checksums")
    try:
        below = [path for path in (folder / MODEL).rglob("*") if path.is_symlink() or not path.is_dir()]
        names = sorted({*map(str, named), *(path.relative_to(folder).as_posix() for path in below)})
        present = [path for name in names if (path := folder / name).exists()]
        state = [(path.stat().st_size, path.stat().st_mtime_ns, path.lstat().st_ino) for path in present]
    except OSError as error:
        raise DamagedArtifact(f"{_show(folder)}: {printable(str(error))}") from error
    key = (str(folder), str(meta.get(OWN_SHA256)), *names, *state)
    if key not in _verified:
        _verified[key] = next(_problems(folder, named, names), None)
    if (problem := _verified[key]) is not None:
        raise DamagedArtifact(f"{_show(folder)} is damaged: {problem}")


def say_damaged(error: DamagedArtifact, instead: str) -> None:
    """Report a damaged version in one line on standard error, once a process, with the replacement `instead`."""
    line = f"{error}; {instead}"
    if line not in _reported:
        _reported.add(line)
        print(line, file=sys.stderr)


def _problems(folder: Path, named: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the files that the JSON names, and of all files below `model/`."""
    for name in names:
        path, about, shown = folder / name, named.get(name), printable(name)
        if ".." in path.parts or not path.resolve().is_relative_to(folder.resolve()):
            yield f"{shown} lies outside of it"
        elif about is None:
            yield f"{shown} is not among the files that meta.json names"
        elif not path.is_file():
            yield f"{shown} is not there"
        elif path.stat().st_size > MOST_BYTES or _unpacked_bytes(path) > MOST_UNPACKED_BYTES:
            yield f"{shown} has more than {MOST_BYTES:,} bytes, or {MOST_UNPACKED_BYTES:,} unpacked"
        elif not isinstance(about, Mapping) or about.get("sha256") != sha256_of(path):
            yield f"{shown} is not what was written: its checksum is another"


def _unpacked_bytes(path: Path) -> int:
    """Return the unpacked size of an archive; 0 for other files, which no reader unpacks either."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return 0


def _show(path: Path) -> str:
    return printable(str(path), 300)


Version = TypeVar("Version")
Loaded = TypeVar("Loaded")
DataPlace: TypeAlias = "str | os.PathLike[str] | DataFolder | None"  # a data folder; None: the default one
FORMAT = 1
DEFAULT_MODELS = Path(__file__).parents[1] / "default_models"
BOUND = "memory_bound"  # the model of memory's 99 % bound, beside those of the targets of `method=fast`
_PACKAGES = ("numpy", "lightgbm", "scikit-learn", "torch", "torch-geometric", "timm")


class Savable(Protocol):
    """A model that writes its files into the folder of a version."""

    def save(self, folder: Path) -> None:
        """Write the files."""


class StaleArtifact(EnvironmentProblem):
    """An artifact fitted with features of other code; the message names the command that fits a new one."""


@dataclass(frozen=True)
class Artifact:
    """One fitted version. `meta` is `meta.json`; the estimator is loaded on first use."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def version(self) -> str:
        return self.path.name

    @cached_property
    def loops(self) -> frozenset[str]:
        """The loops of the rows that it was fitted on."""
        return frozenset(map(loop_of_source, self.meta["rows"]["source"]))

    @cached_property
    def estimator(self) -> Estimator:
        """The fitted estimator, its files verified first. Raises `DamagedArtifact`."""
        self.check()
        with _damaged_unless_read(self.path, "it cannot be loaded"):
            return get_estimator(self.meta["estimator"]).load(self.path / "model")

    def check(self) -> None:
        """Verify the files, without parsing them. Raises `DamagedArtifact`."""
        verify_files(self.path, self.meta)

    def require(self) -> Artifact:
        """Return the artifact, verified, and loaded if its features are current. Raises `DamagedArtifact`."""
        self.check()
        if is_current(self.meta["feature_version"]):
            _ = self.estimator
        return self

    def bound_held_out(self) -> dict[str, float]:
        """Return the `share` of held-out labels below the 99 % bound, and the number of these `rows`; empty
        without a bound."""
        share = self.meta.get("metrics", {}).get("coverage", {}).get("test")
        return {} if share is None else {"share": share, "rows": self.meta["rows"]["test"]}

    @cached_property
    def fitted_run_ids(self) -> frozenset[str]:
        """The ids of the runs that the stored model was fitted on. `learn.fit` refits on all rows, so its models
        include the held-out rows of their report; a promoted model does not."""
        self.check()
        with _damaged_unless_read(self.path, "report.json"):
            report = json.loads((self.path / "report.json").read_text())
            run_ids = list(report["train_run_ids"])
            if report.get("fitted_on", "all") == "all":
                run_ids += report["test_run_ids"] + report.get("refused_run_ids", [])
            return frozenset(map(str, run_ids))


@contextlib.contextmanager
def _damaged_unless_read(path: Path, part: str) -> Iterator[None]:
    """Raise `DamagedArtifact` for any error inside: without a checksum, a parser may raise anything."""
    try:
        yield
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", 200)
        raise DamagedArtifact(f"{_show(path)} is damaged: {part}: {reason}") from error


def save_judged(
    data: DataPlace,
    estimator: Estimator,
    rows: Rows,
    evaluation: Evaluation,
    seed: int,
    now: datetime,
    *,
    fitted_on: str,
    about: Mapping[str, Any],
) -> tuple[Path, dict[str, Any]]:
    """Write a fitted estimator with its evaluation and report page; return the version's path and its `meta.json`.

    Args:
        data: The data folder.
        estimator: The fitted estimator.
        rows: The rows that it was fitted on, or fitted and judged on.
        evaluation: Its evaluation.
        seed: Seed of splits and fits.
        now: Time that names the version; time-zone aware.
        fitted_on: `all`, or `train`: the evaluation's rows are not among the fitted ones.
        about: Further entries of `meta.json`.
    """
    from learn.judging.report import write_report

    train, test = evaluation.train_rows, evaluation.test_rows
    meta = {
        **meta_of_fit(
            estimator,
            rows,
            seed,
            now,
            train=len(train),
            test=len(test),
            groups=len({*rows.group, *test.group}),
            status=dict(rows.counts),
        ),
        "metrics": evaluation.summary(),
        "bins": asdict(evaluation.bins),
        **about,
    }
    report = {
        "cv": list(evaluation.cv),
        "test": evaluation.test,
        "test_run_ids": test.run_ids.tolist(),
        "train_run_ids": train.run_ids.tolist(),
        "refused_run_ids": sorted({*rows.run_ids} - {*train.run_ids, *test.run_ids}),
        "fitted_on": fitted_on,
    }
    path = save_artifact(
        data,
        rows.target.name,
        estimator,
        meta,
        report,
        now=now,
        extras=lambda folder: write_report(folder, evaluation, meta),
    )
    return path, meta


def meta_of_fit(estimator: Estimator, rows: Rows, seed: int, now: datetime, **more_of_rows: Any) -> dict[str, Any]:
    """Return what `meta.json` says of every fit to labelled rows: of the rows (`more_of_rows` too), and by which code.

    `now` is time-zone aware.
    """
    return {
        "format": FORMAT,
        "created_at": now.astimezone(UTC).isoformat(timespec="seconds"),
        "target": rows.target.name,
        "unit": rows.target.unit,
        "estimator": estimator.name,
        "feature_version": FEATURES_STAMP,
        "data_fingerprint": rows.fingerprint(),
        "environment": environment(),
        "rows": {
            "fitted": int((~rows.censored).sum()),
            "censored": int(rows.censored.sum()),
            **{column: rows.count(column) for column in ("family", "source", "device")},
            **more_of_rows,
        },
        "seed": seed,
    }


def save_artifact(
    data: DataPlace,
    target: str,
    estimator: Savable,
    meta: Mapping[str, Any],
    report: Mapping[str, Any],
    *,
    now: datetime,
    extras: Callable[[Path], None] = lambda _folder: None,
) -> Path:
    """Write one version under the data folder's `models/` and return its path.

    `extras(folder)` adds further files (plots) before the version appears. The version is written under a hidden name,
    synced, then renamed: a reader sees all of it or none. `now` is time-zone aware.
    """
    from conf.files.outputs import new_folder

    home = DataFolder.resolve(data).models / target
    meta = {"format": FORMAT, "target": target, "created_at": now.astimezone(UTC).isoformat(), **meta}
    text = json.dumps(meta, indent=1, sort_keys=True)
    short = hashlib.sha256(text.encode()).hexdigest()[:8]
    version = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{short}"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / version).exists():  # else the same data gave the same figures in the same second
        with new_folder(home / version) as building:
            building.mkdir()
            (building / "report.json").write_text(json.dumps(report, indent=1))
            extras(building)
            write_model(building, estimator, meta)
    return home / version


def write_model(folder: Path, model: Savable, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model's files below `folder`, and `meta.json` with the checksums of all that is there; return that
    JSON."""
    (folder / MODEL).mkdir(parents=True)
    model.save(folder / MODEL)
    complete = add_checksums(folder, meta)
    (folder / "meta.json").write_text(json.dumps(complete, indent=1, sort_keys=True))
    return complete


def versions(data: DataPlace, target: str) -> list[Artifact]:
    """Return every complete version of a target, oldest first; empty where nothing was fitted. A version with a damaged
    `meta.json` is reported on standard error and left out."""
    opened = []
    for path in version_folders(data, get_target(target).name):
        try:
            opened.append(open_artifact(path))
        except DamagedArtifact as error:
            say_damaged(error, "it is left out")
    return opened


def version_folders(data: DataPlace, target: str) -> list[Path]:
    """Return the folders of a target's complete versions, oldest first; empty where nothing was fitted."""
    home = DataFolder.resolve(data).models / target
    paths = sorted(home.iterdir()) if home.is_dir() else []
    return [path for path in paths if not path.name.startswith(".") and (path / "meta.json").is_file()]


def newest_whole(
    versions: Sequence[Version], load: Callable[[Version], Loaded], otherwise: str = "no other version is there"
) -> Loaded | None:
    """Return the result of `load` on the newest undamaged version, or None. Damaged ones are reported on standard
    error; `otherwise` is the consequence where no version is left."""
    for older, version in reversed(list(enumerate(versions))):
        try:
            return load(version)
        except DamagedArtifact as error:
            say_damaged(error, "an older version answers" if older else otherwise)
    return None


def open_artifact(path: Path) -> Artifact:
    """Return the artifact in that folder. Raises `DamagedArtifact`."""
    meta = read_json(path / "meta.json")
    if meta.get("estimator") not in ESTIMATORS:
        raise DamagedArtifact(
            f"{_show(path)} is damaged, or of another version of this code: meta.json does not say what it is"
        )
    return Artifact(path, meta)


def newest(
    data: DataPlace | list[Artifact],
    target: str,
    *,
    estimator: str | None = None,
    family: str | None = None,
    device: str | None = None,
    source: str | None = None,
    learnt: bool = False,
    for_modules: bool = False,
    stale: bool = False,
) -> Artifact | None:
    """Return the newest version that was fitted on rows of that family, device and source (None: any), or None.

    Without `estimator`, the hybrid's is preferred. `learnt` skips training-free estimators. `for_modules` takes only
    estimators that read traced steps and were fitted on rows of real devices. `data` may be the target's versions, if
    these are open already. Raises `StaleArtifact` where the version's features are those of other code, unless `stale`.
    """
    fitting = [
        artifact
        for artifact in (data if isinstance(data, list) else versions(data, target))
        if (estimator is None or artifact.meta["estimator"] == estimator)
        and not (learnt and artifact.meta["estimator"] in TRAINING_FREE)
        and (family is None or family in artifact.meta["rows"]["family"])
        and (device is None or any(same_device(device, name) for name in artifact.meta["rows"]["device"]))
        and (source is None or source in artifact.meta["rows"]["source"])
        and not (for_modules and "simulated" in artifact.meta["rows"]["source"])
        and not (for_modules and not get_estimator(artifact.meta["estimator"]).needs_trace)
    ]
    if estimator is None:  # other estimators are fitted to be compared with the hybrid
        fitting = [artifact for artifact in fitting if artifact.meta["estimator"] == PREFERRED] or fitting
    artifact = newest_whole(fitting, Artifact.require)
    return artifact if artifact is None or stale else require_current(artifact)


def require_current(artifact: Artifact) -> Artifact:
    """Return the artifact if its features are current. Raises `StaleArtifact` otherwise."""
    theirs = artifact.meta.get("feature_version")
    if not is_current(theirs):
        target = artifact.meta["target"]
        raise StaleArtifact(
            f"the model {target}/{artifact.version} was fitted with features {theirs}, and this code computes "
            f"features {FEATURES_STAMP}; fit it again: python -m learn.fit target={target}"
        )
    return artifact


def default_artifact(target: str) -> Artifact | None:
    """Return the packaged model (`learn/default_models`), or None for a target without one.

    It is used even where this code's features have changed since its fit: `featurize.configs.features.is_current` then
    rejects `Artifact.meta["feature_version"]`, and callers that show its figures add a note.
    """
    path = DEFAULT_MODELS / get_target(target).name
    try:
        written_ns = (path / "meta.json").stat().st_mtime_ns
    except OSError:
        return None
    try:
        return _open(path, written_ns)
    except DamagedArtifact as error:
        say_damaged(error, "install the project anew; the trace answers")
        return None


@lru_cache(maxsize=8)
def _open(path: Path, _written_ns: int) -> Artifact:
    """Return an artifact that is verified and loaded once; later changes of its files have no effect."""
    return open_artifact(path).require()


def environment() -> dict[str, str | None]:
    """Return the versions of the packages that fit and compute features, from metadata: torch is not imported."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}
