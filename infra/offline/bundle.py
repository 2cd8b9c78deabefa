"""`make offline PYTHON=3.12 MIB=60`: packs the source and wheels for a machine without network, in two parts.

Start reading at `bundle`; `infra.offline.launch` installs the parts there. `needed_wheels` finds wheels for another
Python than this one: it resolves their requirements, downloads with pip, and checks their tags.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import json
import lzma
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from conf.cli.command_line import run
from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, shown
from infra.offline.launch import FORMAT, MANIFEST, file_sha256

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "infra" / "offline" / "launch.py"
CONSTRAINTS = ROOT / "constraints.txt"
# Packages of other extras than `warehouse` and `farm` that a step uses.
_ALSO_NEEDED = {"serve": ("prometheus-client",), "dev": ("pytest",)}
# Tracked files that no step reads, and files of wheels for C++ programs or machines with a network only.
_SOURCE_LEFT_OUT = ("docs/*", "datasets/*", ".ci/*", ".github/*", "infra/grafana/*")
_WHEELS_LEFT_OUT = (
    *("pyarrow/tests/*", "pyarrow/include/*", "pyarrow/src/*", "pyarrow/*.pyx", "pyarrow/*.pxd", "pyarrow/*.pxi"),
    *("pyarrow/*flight*", "pyarrow/*substrait*", "pyarrow/_s3fs*", "pyarrow/libarrow_s3*", "pyarrow/_gcsfs*"),
    *("pyarrow/_azurefs*", "pyarrow/_pyarrow_cpp_tests*"),
    *("ray/jars/*", "ray/cpp/*", "ray/rllib/*", "ray/dashboard/client/*"),
)
# Half of the bytes are x86-64 code; a first filter makes its addresses repeat, so that the second compresses better.
_XZ = {"preset": 6, "dict_size": 32 << 20}
PARTS = {"core": "part-1", "numpy": "part-1", "ray": "part-2"}  # archive -> part
MACHINE = "x86_64"
GLIBC = "2.28"
_PLATFORMS = (*(f"manylinux_2_{minor}_{MACHINE}" for minor in range(28, 4, -1)), f"manylinux2014_{MACHINE}")
_NO_MATCH = re.compile(r"Could not find a version that satisfies the requirement ([A-Za-z0-9._-]+)")


@dataclass(frozen=True, kw_only=True)
class BundleSettings(Checked):
    """Keys of the command."""

    python: str | None = key(None, "the machine's release of Python, such as 3.12")
    mib: float = key(60, "largest size of a part, MiB", "number > 0")
    present: str | tuple[str, ...] = key(
        (),
        "packages that the machine has besides torch's: names, or a file that `pip list --format=freeze` wrote",
        "text | list of text",
    )
    out: str = key("build/offline", "output folder: new, or a former bundle", "new path")
    ray: bool = key(True, "whether to add Ray, in a separate part")


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, make the bundle, print the content of its parts; return the exit code."""
    name = "infra.offline.bundle:BundleSettings"
    return run(name, lambda settings: print("\n".join(bundle(settings))), argv)


def bundle(settings: BundleSettings) -> list[str]:
    """Write the parts; return a table of them with the commands to run on the machine.

    Raises:
        UsageError: Another release of Python is needed, the parts are too small, or the folder holds other files.
        EnvironmentProblem: A wheel for the machine is missing, or this is not a git checkout.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = _release(settings.python, project["requires-python"])
    folder = Path(settings.out)
    _check_replaceable(folder)
    on_machine = brought_by_torch() | packages_present(settings.present)
    source, described = tracked_files()
    requirements = required(project)
    work = folder.with_name(folder.name + ".gpufarm-partial")
    shutil.rmtree(work, ignore_errors=True)  # left by a killed process
    work.mkdir(parents=True)
    try:
        downloaded: dict[str, Path] = {}
        expects: set[str] = set()
        archives: dict[str, dict[str, Any]] = {}
        for name in PARTS if settings.ray else ("core", "numpy"):
            before = set(downloaded)
            expects |= needed_wheels(requirements[name], python, on_machine, downloaded, work / "wheels")
            wheels = [downloaded[package] for package in sorted(downloaded.keys() - before)]
            if name == "core" or wheels:
                archives[name] = _archive(name, wheels, source if name == "core" else (), work / "parts" / PARTS[name])
                _check_size(archives.values(), PARTS[name], settings.mib)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "source": described,
            "python": python,
            "machine": MACHINE,
            "glibc": GLIBC,
            "torch": next(spec.version for spec in requirements["torch"].specifier if spec.operator == ">="),
            "expects": sorted(expects),
            "archives": archives,
        }
        manifest["bundle"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
        for part in (work / "parts").iterdir():
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            shutil.copyfile(LAUNCHER, part / "offline.py")
        if folder.exists():
            os.replace(folder, work / "former")
        os.replace(work / "parts", folder)
    finally:
        shutil.rmtree(work)
    return _table(folder, manifest, archives)


def _release(python: str | None, required_python: str) -> str:
    minimum = required_python.removeprefix(">=")
    if python is None or not re.fullmatch(r"\d+\.\d+", python):
        raise UsageError(f"python= must be the machine's release of Python, as 3.12, got {shown(python)}")
    if Version(python) < Version(minimum):
        raise UsageError(f"python= must be {minimum} or newer, got {python}")
    return python


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or any(not (entry / MANIFEST).is_file() for entry in folder.iterdir()):
        raise UsageError(f"out={shown(str(folder))} is not a former bundle; name a new folder")


def packages_present(present: str | Sequence[str]) -> dict[str, Version | None]:
    """Return name -> version, or None without one, for the file or names of `present=`."""
    lines: Iterable[str] = [present] if isinstance(present, str) else present
    if isinstance(present, str) and (os.sep in present or present.endswith(".txt") or Path(present).is_file()):
        try:
            lines = Path(present).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"present={shown(present)} cannot be read: {error}") from error
    versions: dict[str, Version | None] = {}
    for line in lines:
        name, _, version = line.partition(" @ ")[0].strip().partition("==")
        if not name or name.startswith(("#", "-")):
            continue
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise UsageError(f"present= has {shown(line)}; write names, or lines of `pip list --format=freeze`")
        try:
            versions[canonicalize_name(name)] = Version(version) if version else None
        except InvalidVersion:  # such as Ubuntu's `distro-info==1.1build1`
            versions[canonicalize_name(name)] = None
    return versions


def required(project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requirements of pyproject.toml by archive, and torch's requirement."""
    extras = {name: [Requirement(line) for line in lines] for name, lines in project["optional-dependencies"].items()}

    def members(extra: str) -> Iterator[Requirement]:
        for requirement in extras[extra]:
            if requirement.name == project["name"]:
                for inner in requirement.extras:
                    yield from members(inner)
            else:
                yield requirement

    wanted = [*map(Requirement, project["dependencies"]), *members("farm")]
    for extra, names in _ALSO_NEEDED.items():
        wanted += [requirement for requirement in extras[extra] if canonicalize_name(requirement.name) in names]
    alone = {requirement.name: requirement for requirement in wanted if requirement.name in ("torch", "numpy", "ray")}
    core = [requirement for requirement in wanted if requirement.name not in alone]
    return {"core": core, "numpy": [alone["numpy"]], "ray": [alone["ray"]], "torch": alone["torch"]}


def tracked_files() -> tuple[list[str], str]:
    """Return the tracked files that the machine needs, and git's description of their state."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise EnvironmentProblem(f"{ROOT} is not a git checkout; the source is git's tracked files")
    files = [
        name
        for name in listed.stdout.split("\0")
        if name and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SOURCE_LEFT_OUT)
    ]
    if gone := [name for name in files if not (ROOT / name).exists()]:
        raise EnvironmentProblem(f"{gone[0]} is tracked by git but not there; restore it or remove it from git")
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return files, described.stdout.strip()


def _archive(name: str, wheels: Sequence[Path], source: Sequence[str], part: Path) -> dict[str, Any]:
    """Compress unpacked wheels, in the layout of an installer, and source files into an archive of a part.

    Returns the archive's entry in the manifest; `packages` maps names to versions.
    """
    part.mkdir(parents=True, exist_ok=True)
    path = part / f"{name}.tar.xz"
    site = "site" if name == "core" else f"site-{name}"
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, **_XZ}]
    with lzma.open(path, "wb", filters=filters) as compressed, tarfile.open(fileobj=compressed, mode="w") as archive:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as zipped:
                for entry, place in _installed_files(zipped):
                    member = tarfile.TarInfo(f"{site}/{place}")
                    member.size = entry.file_size
                    member.mode = 0o755 if entry.external_attr >> 16 & 0o111 else 0o644
                    with zipped.open(entry) as content:
                        archive.addfile(member, content)
        for file in source:
            member = archive.gettarinfo(ROOT / file, f"source/{file}")
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            with open(ROOT / file, "rb") as content:
                archive.addfile(member, content if member.isreg() else None)
    versions = {
        str(package): str(version) for package, version, *_ in map(parse_wheel_filename, (w.name for w in wheels))
    }
    return {
        "part": part.name,
        "bytes": path.stat().st_size,
        "sha256": file_sha256(path),
        "packages": versions,
    }


def _installed_files(wheel: zipfile.ZipFile) -> list[tuple[zipfile.ZipInfo, str]]:
    """Return the files of a wheel that a step may load, and their installed paths."""
    kept: list[tuple[zipfile.ZipInfo, str]] = []
    left_out: list[tuple[zipfile.ZipInfo, str]] = []
    for entry in wheel.infolist():
        place = entry.filename
        if ".data/" in place:  # a wheel's data folder; its scripts and headers are not needed
            kind, _, place = place.partition(".data/")[2].partition("/")
            if kind not in ("purelib", "platlib"):
                continue
        if not entry.is_dir():
            matches = any(fnmatch.fnmatchcase(place, pattern) for pattern in _WHEELS_LEFT_OUT)
            (left_out if matches else kept).append((entry, place))
    # A kept library may load a left-out one by name: releases differ in their links.
    libraries = {Path(place).name: (entry, place) for entry, place in left_out if ".so" in place}
    for entry, place in kept:  # the loop extends the list
        if libraries and ".so" in place:
            content = wheel.read(entry)
            kept += [libraries.pop(name) for name in list(libraries) if name.encode() + b"\0" in content]
    return kept


def _check_size(archives: Iterable[Mapping[str, Any]], part: str, mib: float) -> None:
    """Raise `UsageError` if a part is larger than `mib`."""
    beside_bytes = LAUNCHER.stat().st_size + (64 << 10)  # the launcher, and more than a manifest takes
    needed_mib = (beside_bytes + sum(archive["bytes"] for archive in archives if archive["part"] == part)) / 2**20
    if needed_mib > mib:
        raise UsageError(
            f"mib={mib:.4g} is too small: {part} takes {math.ceil(needed_mib)}; or leave out with present= what the "
            "machine has, or Ray with ray=false"
        )


def _table(folder: Path, manifest: Mapping[str, Any], archives: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"for CPython {manifest['python']}, Linux on {manifest['machine']}, torch {manifest['torch']} or newer"]
    for name, archive in archives.items():
        packages = ", ".join(f"{package} {version}" for package, version in sorted(archive["packages"].items()))
        lines.append(f"{folder / archive['part']}: {name}: {archive['bytes'] / 2**20:.1f} MiB")
        lines.append(f"    {'the source, ' if name == 'core' else ''}{packages}")
    return [
        *lines,
        "On the machine:",
        "    python3 part-1/offline.py install target=/tmp/gpufarm",
        "    python3 part-1/offline.py collect minutes=8 results=results target=/tmp/gpufarm",
    ]


def brought_by_torch() -> dict[str, Version | None]:
    """Return the names of torch and its requirements, recursively, as installed here, without versions."""
    names: dict[str, Version | None] = {}
    wanted = ["torch"]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in names:
            continue
        names[name] = None
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # another build of torch, or another platform
            continue
        wanted += [
            requirement.name for requirement in map(Requirement, lines) if "extra" not in str(requirement.marker)
        ]
    return names


def needed_wheels(
    requirements: Iterable[Requirement],
    python: str,
    on_machine: Mapping[str, Version | None],
    wheels: dict[str, Path],
    folder: Path,
) -> set[str]:
    """Download a wheel for each requirement, and recursively for the wheels' requirements.

    Args:
        requirements: The needed packages.
        python: The machine's release of Python, such as `3.12`.
        on_machine: Name -> version, or None for any, of the machine's packages, which need no wheel if they fit.
        wheels: Name -> path of its wheel; new wheels are added.
        folder: Folder for downloaded wheels.

    Returns:
        Names in `on_machine` that something requires.

    Raises:
        EnvironmentProblem: The target has no wheel, or two requirements contradict each other.
    """
    pins = _pins()
    markers = {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": MACHINE,
        "extra": "",
    }
    expected: set[str] = set()
    wanted = list(requirements)
    while wanted:
        specifiers: dict[str, SpecifierSet] = {}
        for requirement in wanted:
            name, specifier = canonicalize_name(requirement.name), requirement.specifier
            if requirement.marker is not None and not requirement.marker.evaluate(markers):
                continue
            if name in on_machine and ((version := on_machine[name]) is None or specifier.contains(version, True)):
                expected.add(name)
            elif name in wheels:
                version = parse_wheel_filename(wheels[name].name)[1]
                if not specifier.contains(version, prereleases=True):
                    raise EnvironmentProblem(f"{name} {version} is taken, but something requires {name}{specifier}")
            else:
                specifiers[name] = specifiers.get(name, SpecifierSet()) & specifier
        added = _download(specifiers, pins, python, folder)
        wheels.update(added)
        wanted = [requirement for path in added.values() for requirement in _requirements_of(path)]
    return expected


def _pins() -> dict[str, Version]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def _requirements_of(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as zipped:
        (path,) = (name for name in zipped.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(zipped.read(path).decode())
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def _download(
    specifiers: Mapping[str, SpecifierSet], pins: Mapping[str, Version], python: str, folder: Path
) -> dict[str, Path]:
    """Download a wheel for each name: the pinned release, else any that fits, else one built from sources."""
    wanted = {
        name: f"{name}=={pins[name]}" if name in pins and specifier.contains(pins[name]) else f"{name}{specifier}"
        for name, specifier in specifiers.items()
    }
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    while wanted:
        completed = _pip("download", "--dest", folder, *options, *wanted.values())
        if completed.returncode == 0:
            break
        if "connection broken" in completed.stderr:
            raise EnvironmentProblem("pip reaches no index; connect, or set PIP_INDEX_URL or PIP_FIND_LINKS")
        match = _NO_MATCH.search(completed.stderr)
        name = canonicalize_name(match[1]) if match else None
        if name not in wanted:
            lines = [line for line in completed.stderr.splitlines() if line.startswith("ERROR")] or [
                completed.stderr.strip()
            ]
            raise EnvironmentProblem(f"pip cannot download wheels: {lines[-1]}")
        if wanted[name] != f"{name}{specifiers[name]}":
            wanted[name] = f"{name}{specifiers[name]}"
        else:
            _build_wheel(wanted.pop(name), python, folder)
    paths = {str(parse_wheel_filename(path.name)[0]): path for path in folder.glob("*.whl")}
    return {name: paths[name] for name in specifiers}


def _build_wheel(requirement: str, python: str, folder: Path) -> None:
    """Build a wheel of a project that publishes only sources; compiled code would not fit another Python."""
    missing = f"there is no wheel of {requirement} for Python {python} on {MACHINE}"
    before = set(folder.glob("*.whl"))
    if _pip("wheel", "--wheel-dir", folder, requirement).returncode:
        raise EnvironmentProblem(f"{missing}, and none can be built; choose another PYTHON=, or name it in present=")
    (wheel,) = set(folder.glob("*.whl")) - before
    if not wheel.name.endswith("-none-any.whl"):
        raise EnvironmentProblem(f"{missing}, only for this machine's; choose another PYTHON=, or name it in present=")


def _pip(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps"]
    return subprocess.run([*words, *map(str, arguments)], capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
