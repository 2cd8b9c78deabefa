"""`make offline PYTHON=3.12 MIB=60`: packs the source and wheels for a machine without network, in two parts.

Start reading at `bundle`; `infra.offline.launch` installs the parts there. `needed_packages` has pip install for
another Python than this one.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import lzma
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from conf.cli.command_line import command
from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, shown
from infra.offline.launch import FORMAT, MANIFEST, file_sha256
from infra.offline.steps import STEPS

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "infra" / "offline" / "launch.py"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("cli", "warehouse", "farm")  # extras of this project that every step uses
_ALSO_NEEDED = ("prometheus-client", "pytest")  # packages of other extras that a step uses
# Tracked files that no step reads, and files of wheels for C++ programs or machines with a network only.
_SOURCE_LEFT_OUT = ("docs/*", "datasets/*", ".ci/*", ".github/*", "infra/grafana/*")
_PACKAGES_LEFT_OUT = (
    "../*",
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
# Torch and what each of its releases requires, without NVIDIA's libraries.
BROUGHT_BY_TORCH = (
    "torch",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "sympy",
    "typing-extensions",
)
_ONLY_SOURCES = ("antlr4-python3-runtime==4.9.*",)  # what Hydra needs and nobody publishes as a wheel
_PLATFORMS = (*(f"manylinux_2_{minor}_{MACHINE}" for minor in range(28, 4, -1)), f"manylinux2014_{MACHINE}")


@dataclass(frozen=True, kw_only=True)
class BundleSettings(Checked):
    """Keys of the command."""

    python: str | None = key(None, "the machine's release of Python, such as 3.12")
    mib: float = key(60, "largest size of a part, MiB", "number > 0")
    present: str | None = key(
        None, "file that `pip list --format=freeze` wrote on the machine: what it has besides torch's", "path | null"
    )
    out: str = key("build/offline", "output folder: new, or a former bundle", "new path")
    ray: bool = key(True, "whether to add Ray, in a separate part")


def bundle(settings: BundleSettings) -> list[str]:
    """Write the parts; return a table of them with the commands to run on the machine.

    Raises:
        UsageError: Another release of Python is needed, the parts are too small, or the folder holds other files.
        EnvironmentProblem: A wheel for the machine is missing, or this is not a git checkout.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = _release(settings.python, project["requires-python"])
    folder = Path(settings.out).absolute()
    if folder.exists() and not (folder.is_dir() and all((part / MANIFEST).is_file() for part in folder.iterdir())):
        raise UsageError(f"out={shown(settings.out)} is not a former bundle; name a new folder")
    on_machine: dict[str, Version | None] = dict.fromkeys(BROUGHT_BY_TORCH)
    if settings.present is not None:
        on_machine |= packages_present(settings.present)
    source = tracked_files()
    requirements = required(project)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        work = Path(temporary)
        packed: set[str] = set()
        expects: set[str] = set()
        archives: dict[str, dict[str, Any]] = {}
        for name in PARTS if settings.ray else ("core", "numpy"):
            needed, fitting = needed_packages(requirements[name], python, on_machine, work / name)
            packages = [needed[package] for package in sorted(needed.keys() - packed)]
            packed |= needed.keys()
            expects |= fitting
            if name == "core" or packages:
                own_source = source if name == "core" else ()
                archives[name] = _archive(name, packages, own_source, work / "parts" / PARTS[name])
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "steps": list(STEPS),
            "python": python,
            "machine": MACHINE,
            "glibc": GLIBC,
            "torch": next(spec.version for spec in requirements["torch"][0].specifier if spec.operator == ">="),
            "expects": sorted(expects),
            "archives": archives,
        }
        for part in (work / "parts").iterdir():
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            shutil.copyfile(LAUNCHER, part / "offline.py")
            needed_mib = sum(file.stat().st_size for file in part.iterdir()) / 2**20
            if needed_mib > settings.mib:
                raise UsageError(
                    f"mib={settings.mib:.4g} is too small: {part.name} takes {math.ceil(needed_mib)}; or leave out "
                    "with present= what the machine has, or Ray with ray=false"
                )
        if folder.exists():
            os.replace(folder, work / "former")
        os.replace(work / "parts", folder)
    return _table(folder, manifest, archives)


def _release(python: str | None, required_python: str) -> str:
    if python is None or not re.fullmatch(r"\d+\.\d+", python):
        raise UsageError(f"python= must be the machine's release of Python, as 3.12, got {shown(python)}")
    if not SpecifierSet(required_python).contains(python):
        raise UsageError(f"python= must be {required_python.removeprefix('>=')} or newer, got {python}")
    return python


def packages_present(listed: str) -> dict[str, Version | None]:
    """Return name -> version, or None without one, for the file of `present=`."""
    try:
        lines = Path(listed).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"present={shown(listed)} cannot be read: {error}") from error
    versions: dict[str, Version | None] = {}
    for line in lines:
        name, _, version = line.partition(" @ ")[0].strip().partition("==")
        if not name or name.startswith(("#", "-")):
            continue
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise UsageError(f"present={listed} has {shown(line)}, which is no line of `pip list --format=freeze`")
        try:
            versions[canonicalize_name(name)] = Version(version) if version else None
        except InvalidVersion:  # such as Ubuntu's `distro-info==1.1build1`
            versions[canonicalize_name(name)] = None
    return versions


def required(project: Mapping[str, Any]) -> dict[str, list[Requirement]]:
    """Return the requirements of pyproject.toml by archive, and torch's."""
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    wanted = [requirement for requirement in map(Requirement, lines) if requirement.name != project["name"]]
    others = map(Requirement, itertools.chain.from_iterable(project["optional-dependencies"].values()))
    wanted += [requirement for requirement in others if canonicalize_name(requirement.name) in _ALSO_NEEDED]
    by_archive: dict[str, list[Requirement]] = defaultdict(list)
    for requirement in wanted:
        by_archive[requirement.name if requirement.name in ("torch", "numpy", "ray") else "core"].append(requirement)
    return by_archive


def tracked_files() -> list[str]:
    """Return the tracked files that the machine needs."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise EnvironmentProblem(f"{ROOT} is not a git checkout; the source is git's tracked files")
    return [
        name
        for name in listed.stdout.split("\0")
        if (ROOT / name).is_file() and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SOURCE_LEFT_OUT)
    ]


def _archive(name: str, packages: Sequence[Distribution], source: Sequence[str], part: Path) -> dict[str, Any]:
    """Compress installed packages and source files into an archive of a part.

    Returns the archive's entry in the manifest; `packages` maps names to versions.
    """
    part.mkdir(parents=True, exist_ok=True)
    path = part / f"{name}.tar.xz"
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, **_XZ}]
    with lzma.open(path, "wb", filters=filters) as compressed, tarfile.open(fileobj=compressed, mode="w") as archive:
        for package in packages:
            for file in _loaded_files(package):
                archive.add(file.locate(), f"site/{file}", filter=_without_owner)
        for name in source:
            archive.add(ROOT / name, f"source/{name}", filter=_without_owner)
    return {
        "part": part.name,
        "bytes": path.stat().st_size,
        "sha256": file_sha256(path),
        "packages": {canonicalize_name(package.name): package.version for package in packages},
    }


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _loaded_files(package: Distribution) -> list[PackagePath]:
    """Return the files of a package that a step may load; scripts are not needed."""
    kept: list[PackagePath] = []
    libraries: dict[str, PackagePath] = {}  # left-out ones by name
    for file in package.files or ():
        if not any(fnmatch.fnmatchcase(str(file), pattern) for pattern in _PACKAGES_LEFT_OUT):
            kept.append(file)
        elif ".so" in file.name:
            libraries[file.name] = file
    # A kept library may load a left-out one by name: releases differ in their links.
    for file in kept:  # the loop extends the list
        if libraries and ".so" in file.name:
            content = file.read_binary()
            kept += [libraries.pop(name) for name in list(libraries) if name.encode() + b"\0" in content]
    return kept


def _table(folder: Path, manifest: Mapping[str, Any], archives: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"for CPython {manifest['python']}, Linux on {manifest['machine']}, torch {manifest['torch']} or newer"]
    for name, archive in archives.items():
        packages = ", ".join(f"{package} {version}" for package, version in sorted(archive["packages"].items()))
        lines.append(f"{folder / archive['part']}: {name}: {archive['bytes'] / 2**20:.1f} MiB")
        lines.append(f"    {'the source, ' if name == 'core' else ''}{packages}")
    return [*lines, "On the machine:", "    python3 part-1/offline.py collect minutes=8 results=results"]


def needed_packages(
    requirements: Sequence[Requirement], python: str, on_machine: Mapping[str, Version | None], folder: Path
) -> tuple[dict[str, Distribution], set[str]]:
    """Install requirements, and what these require, for the machine into a folder.

    Args:
        requirements: The needed packages.
        python: The machine's release of Python, such as `3.12`.
        on_machine: Name -> version, or None for any, of the machine's packages, which need no other if they fit.
        folder: A folder that does not exist.

    Returns:
        Name -> package to bring, and the names in `on_machine` that take the place of one.

    Raises:
        EnvironmentProblem: There is no wheel for the machine, or requirements contradict each other.
    """
    _install(requirements, python, folder)
    installed = {canonicalize_name(package.name): package for package in distributions(path=[str(folder)])}
    lines = itertools.chain.from_iterable(package.requires or () for package in installed.values())
    markers = {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": MACHINE,
        "extra": "",
    }
    specifiers: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    for requirement in (*requirements, *map(Requirement, lines)):
        if requirement.marker is None or requirement.marker.evaluate(markers):
            specifiers[canonicalize_name(requirement.name)] &= requirement.specifier
    # pip reads the markers of requirements for the Python that runs it.
    if missing := sorted(specifiers.keys() - installed.keys() - on_machine.keys()):
        raise EnvironmentProblem(f"Python {python} also needs {', '.join(missing)}; make the bundle with that Python")
    fitting = {
        name
        for name in on_machine.keys() & specifiers.keys()
        if (version := on_machine[name]) is None or specifiers[name].contains(version, prereleases=True)
    }
    return {name: installed[name] for name in installed.keys() & specifiers.keys() - fitting}, fitting


def _install(requirements: Sequence[Requirement], python: str, folder: Path) -> None:
    """Install wheels and what they require into a folder, of the pinned releases if the target has them."""
    built = folder.with_name("built")
    _pip("wheel", "--no-deps", "--wheel-dir", built, *_ONLY_SOURCES)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    options: list[object] = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    options += ["--target", folder, "--no-compile", "--no-warn-conflicts", "--find-links", built]
    for pins in (["--constraint", CONSTRAINTS], []):
        completed = _pip("install", *options, *pins, *requirements)
        if completed.returncode == 0:
            return
    if "connection broken" in completed.stderr:
        raise EnvironmentProblem("pip reaches no index; connect, or set PIP_INDEX_URL or PIP_FIND_LINKS")
    errors = [line for line in completed.stderr.splitlines() if line.startswith("ERROR")]
    raise EnvironmentProblem(
        f"there is no wheel for Python {python} on {MACHINE}: {errors[-1] if errors else completed.stderr.strip()}; "
        "choose another PYTHON="
    )


def _pip(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*words, *map(str, arguments)], capture_output=True, text=True)


def entry(settings: BundleSettings) -> None:
    """Make the bundle and print the content of its parts."""
    print("\n".join(bundle(settings)))


if __name__ == "__main__":
    command("infra.offline.bundle:BundleSettings", entry)
