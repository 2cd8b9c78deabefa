"""`offline.py` in each part of an offline bundle: installs without a network, and starts a step.

Start reading at `main`; standard library only. `infra.offline.bundle` writes the manifest that `install` reads.
"""

# Only Python 3.6's syntax: an unsuitable Python can read the file and print one line instead of a traceback.
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from typing import Any

FORMAT = 4
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # end of the name of an archive in the target that is being unpacked
ARCHIVE = re.compile(r"[a-z]+-[0-9a-f]{16}(\.partial)?")
NEEDED = {"core": "what every step needs", "numpy": "NumPy, which this Python lacks"}
USAGE = """usage: python3 offline.py install [target=DIR] [parts=DIR,DIR...]
       python3 offline.py STEP[,STEP...] [target=DIR] [parts=DIR,DIR...] [KEY=VALUE...]
steps: {steps}
A step installs first where the target is empty. Common keys: minutes=8 results=DIR device=cuda
target: {target} by default; parts: the folders beside this script by default"""


class Problem(Exception):
    """A reason to stop the command. Its message is one line that says what to change."""


def main(argv: "list[str]") -> int:
    """Run `install` or a step, which replaces this process; return the exit code, 2 for bad input."""
    options = {"target": os.path.join(tempfile.gettempdir(), "gpufarm"), "parts": ""}
    others = []
    for argument in argv[1:]:
        key, _, value = argument.partition("=")
        if key in options and value:
            options[key] = value
        else:
            others.append("results=" + os.path.abspath(value) if key == "results" and value else argument)
    try:
        target = os.path.abspath(options["target"])
        folders = part_folders(options["parts"])
        manifest = read_manifest(folders[0])
        names = argv[0].split(",") if argv else ["help"]
        if names[0] in ("-h", "--help", "help"):
            print(USAGE.format(steps=" | ".join(manifest["steps"]), target=target))
            return 0
        unknown = [name for name in names if name not in manifest["steps"]]
        if unknown and names != ["install"]:
            raise Problem("unknown step {!r}; known: install, {}".format(unknown[0], ", ".join(manifest["steps"])))
        if unknown and others:
            raise Problem(f"unknown argument {others[0]!r}; valid are target=DIR, parts=DIR,DIR")
        for argument in others:
            if not all(argument.partition("=")):
                raise Problem(f"{argument!r} is not KEY=VALUE")
        for line in install(target, manifest, folders):
            print(line, flush=True)
        if not unknown:
            start(target, manifest, ["steps=[" + argv[0] + "]", *others])
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except (OSError, tarfile.TarError, EOFError) as error:
        print(f"error: {error}; run the same command again", file=sys.stderr)
        return 1
    return 0


def part_folders(given: str) -> "list[str]":
    """Return the folders of the parts: the given ones, or this script's folder and those beside it."""
    if given:
        return [os.path.abspath(folder) for folder in given.split(",")]
    own_folder = os.path.dirname(os.path.abspath(__file__))
    beside = os.path.dirname(own_folder)
    return [own_folder] + [os.path.join(beside, name) for name in sorted(os.listdir(beside))]


def read_manifest(part: str) -> "dict[str, Any]":
    """Return the manifest of a part; every part of a bundle has the same."""
    try:
        with open(os.path.join(part, MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)  # type: dict[str, Any]
        if manifest["format"] != FORMAT:
            raise ValueError("another format")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"{part} is not part of an offline bundle: {MANIFEST}: {error}") from error
    return manifest


def places(target: str, manifest: "dict[str, Any]") -> "dict[str, str]":
    """Return the folder of each archive in the target, named by its content: bundles may lie beside each other."""
    archives = manifest["archives"].items()
    return {name: os.path.join(target, name + "-" + archive["sha256"][:16]) for name, archive in archives}


def install(target: str, manifest: "dict[str, Any]", folders: "list[str]") -> "list[str]":
    """Check everything, then unpack missing archives into the target; return lines to print.

    An archive appears in the target whole or not at all.
    """
    if os.path.exists(target) and not (os.path.isdir(target) and all(map(ARCHIVE.fullmatch, os.listdir(target)))):
        raise Problem(f"{target} is not empty and holds no install; name another folder with target=")
    check_machine(manifest)
    missing = {
        name: place
        for name, place in places(target, manifest).items()
        if not os.path.isdir(place) and not (name == "numpy" and on_machine(name))
    }
    if not missing:
        return [f"{target} holds all of the bundle"]
    if "core" in missing:
        check_torch(manifest)
    paths = {}
    for name in missing:
        archive = manifest["archives"][name]
        candidates = [os.path.join(folder, name + ".tar.xz") for folder in folders]
        here = [path for path in candidates if os.path.exists(path)]
        if here:
            paths[name] = here[0]
            if file_sha256(here[0]) != archive["sha256"]:
                raise Problem(
                    f"{here[0]} is damaged or of another bundle: its SHA-256 is not the manifest's; copy "
                    f"{archive['part']} again"
                )
        elif name in NEEDED:
            raise Problem(f"{archive['part']} is missing; it holds {NEEDED[name]}; name its folder with parts=")

    lines = []
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # type: dict[str, Any]
    for name, path in paths.items():
        stage = missing[name] + PARTIAL
        shutil.rmtree(stage, ignore_errors=True)
        with tarfile.open(path, "r:xz") as content:
            content.extractall(stage, **options)
        os.rename(stage, missing[name])
        packages = sorted(manifest["archives"][name]["packages"].items())
        lines.append(f"installed {name}: " + ", ".join(f"{package} {version}" for package, version in packages))
    return lines


def file_sha256(path: "str | os.PathLike[str]") -> str:
    with open(path, "rb") as file:  # a part has at most some tens of MiB
        return hashlib.sha256(file.read()).hexdigest()


def check_machine(manifest: "dict[str, Any]") -> None:
    """Raise `Problem` if the bundle was made for another machine or Python. Called every time."""
    version = ".".join(map(str, sys.version_info[:2]))
    libc, libc_version = platform.libc_ver()
    requirements = [
        (
            platform.system() == "Linux" and platform.machine() == manifest["machine"],
            f"the bundle is for Linux on {manifest['machine']}; this is {platform.system()} on {platform.machine()}",
        ),
        (
            sys.implementation.name == "cpython" and version == manifest["python"],
            f"the bundle is for CPython {manifest['python']}; this is {sys.implementation.name} {version}: start "
            f"offline.py with python{manifest['python']}, or make a bundle with PYTHON={version}",
        ),
        (
            libc == "glibc" and numbers(libc_version) >= numbers(manifest["glibc"]),
            f"the wheels need glibc {manifest['glibc']} or newer; this machine has {libc or 'another C library'} "
            f"{libc_version}",
        ),
        (
            importlib.util.find_spec("_lzma") is not None,
            f"{sys.executable} has no module lzma; start offline.py with a Python that has it",
        ),
        (
            importlib.util.find_spec("torch") is not None,
            f"{sys.executable} has no torch; start offline.py with the Python that has it",
        ),
    ]
    for is_met, problem in requirements:
        if not is_met:
            raise Problem(problem)
    missing = ", ".join(name for name in manifest["expects"] if not on_machine(name))
    if missing:
        raise Problem(
            f"this Python lacks {missing}, which the bundle expects here; install it, or make the bundle again "
            f"with {missing} left out of present="
        )


def check_torch(manifest: "dict[str, Any]") -> None:
    """Raise `Problem` where torch is too old or cannot be imported, which takes seconds."""
    command = [sys.executable, "-W", "ignore", "-c", "import torch; print(torch.__version__)"]
    completed = subprocess.run(command, capture_output=True)
    if completed.returncode:
        reason = (completed.stderr.decode(errors="replace").splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise Problem(f"{sys.executable} cannot import torch: {reason}; start offline.py with the Python that has it")
    release = completed.stdout.decode().split()[-1]
    if numbers(release) < numbers(manifest["torch"]):
        raise Problem(f"torch {release} is too old; {manifest['torch']} or newer is needed")


def numbers(version: str) -> "tuple[int, ...]":
    """Return the leading numbers of a version, for comparison: (2, 11) of `2.11.0+cu130`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def on_machine(distribution: str) -> bool:
    from importlib import metadata  # which Pythons that `check_machine` refuses may lack

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def start(target: str, manifest: "dict[str, Any]", arguments: "list[str]") -> None:
    """Replace this process by the step, so that it gets signals and sets the exit code."""
    archives = places(target, manifest)
    sites = [os.path.join(place, "site") for place in archives.values()]
    paths = [*filter(os.path.isdir, sites), os.path.join(archives["core"], "source")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONUNBUFFERED="1")
    os.chdir(target)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "infra.offline.steps", *arguments], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
