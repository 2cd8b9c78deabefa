"""Wheels for another Python than this one: resolved by what wheels require, downloaded by pip, checked by their tags.

Start reading at `needed_wheels`.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from conf.errors import EnvironmentProblem

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
MACHINE = "x86_64"
GLIBC = "2.28"
_PLATFORMS = (*(f"manylinux_2_{minor}_{MACHINE}" for minor in range(28, 4, -1)), f"manylinux2014_{MACHINE}")
_NO_MATCH = re.compile(r"Could not find a version that satisfies the requirement ([A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class Target:
    """The machine's Python, as `3.12`."""

    python: str

    @property
    def markers(self) -> dict[str, str]:
        """The environment in which markers of requirements hold there."""
        return {
            **default_environment(),
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": MACHINE,
            "extra": "",
        }

    @property
    def pip_options(self) -> list[str]:
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        return ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python, *platforms]


def brought_by_torch() -> dict[str, Version | None]:
    """Return torch and what it requires, in turn, as installed here; not their versions, which are the machine's."""
    names: dict[str, Version | None] = {}
    wanted = ["torch"]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in names:
            continue
        names[name] = None
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another build of torch, or another platform
            continue
        wanted += [
            requirement.name for requirement in map(Requirement, lines) if "extra" not in str(requirement.marker)
        ]
    return names


def needed_wheels(
    requirements: Iterable[Requirement],
    target: Target,
    on_machine: Mapping[str, Version | None],
    wheels: dict[str, Path],
    folder: Path,
) -> set[str]:
    """Download a wheel for each requirement, and in turn for what the wheels require.

    Args:
        requirements: What is needed.
        target: The Python for which the wheels are.
        on_machine: The version, or None for any, by name of what the machine has; no wheel is needed where it fits.
        wheels: Path of the wheel by name: those that are there already, and those that are added.
        folder: Where wheels are downloaded.

    Returns:
        The names among `on_machine` that something requires.

    Raises:
        EnvironmentProblem: There is no wheel for the target, or two requirements contradict each other.
    """
    pins = _pins()
    expected: set[str] = set()
    wanted = list(requirements)
    while wanted:
        specifiers: dict[str, SpecifierSet] = {}
        for requirement in wanted:
            name, specifier = canonicalize_name(requirement.name), requirement.specifier
            if requirement.marker is not None and not requirement.marker.evaluate(target.markers):
                continue
            if name in on_machine and ((version := on_machine[name]) is None or specifier.contains(version, True)):
                expected.add(name)
            elif name in wheels:
                version = parse_wheel_filename(wheels[name].name)[1]
                if not specifier.contains(version, prereleases=True):
                    raise EnvironmentProblem(f"{name} {version} is taken, but something requires {name}{specifier}")
            else:
                specifiers[name] = specifiers.get(name, SpecifierSet()) & specifier
        added = _download(specifiers, pins, target, folder)
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
    specifiers: Mapping[str, SpecifierSet], pins: Mapping[str, Version], target: Target, folder: Path
) -> dict[str, Path]:
    """Download a wheel for each name: of the pinned release, else of any that fits, else built from sources."""
    asked = {
        name: f"{name}=={pins[name]}" if name in pins and specifier.contains(pins[name]) else f"{name}{specifier}"
        for name, specifier in specifiers.items()
    }
    built: list[Path] = []
    while asked:
        done = _pip("download", "--dest", folder, *target.pip_options, *asked.values())
        if done.returncode == 0:
            break
        if "connection broken" in done.stderr:
            raise EnvironmentProblem("pip reaches no index; connect, or set PIP_INDEX_URL or PIP_FIND_LINKS")
        match = _NO_MATCH.search(done.stderr)
        name = canonicalize_name(match[1]) if match else None
        if name not in asked:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise EnvironmentProblem(f"pip cannot download wheels: {lines[-1]}")
        if asked[name] != f"{name}{specifiers[name]}":
            asked[name] = f"{name}{specifiers[name]}"
        else:
            built.append(_built_wheel(asked.pop(name), target, folder))
    paths = {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}
    return {name: paths[name] for name in specifiers}


def _built_wheel(requirement: str, target: Target, folder: Path) -> Path:
    """Build a wheel of a project that publishes sources alone; one that holds compiled code fits no other Python."""
    missing = f"there is no wheel of {requirement} for Python {target.python} on {MACHINE}"
    before = set(folder.glob("*.whl"))
    if _pip("wheel", "--wheel-dir", folder, requirement).returncode:
        raise EnvironmentProblem(f"{missing}, and none can be built; choose another PYTHON=, or name it in present=")
    (wheel,) = set(folder.glob("*.whl")) - before
    if not wheel.name.endswith("-none-any.whl"):
        raise EnvironmentProblem(f"{missing}, only for this machine's; choose another PYTHON=, or name it in present=")
    return wheel


def _pip(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps"]
    return subprocess.run([*words, *map(str, arguments)], capture_output=True, text=True)
