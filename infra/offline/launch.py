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

FORMAT = 2
STEPS = ("test", "calibrate", "allocator", "bench", "collect", "kernels", "pairs", "ranks", "power")
PATH_KEYS = ("results", "work")  # keys of steps that are paths, made absolute because a step runs in another folder
MANIFEST = "manifest.json"
INSTALLED = "bundle.json"  # file in the target that identifies the bundle
NEEDED = {"core": "what every step needs", "numpy": "NumPy, which this Python lacks"}
USAGE = """usage: python3 offline.py install [target=DIR] [parts=DIR,DIR...]
       python3 offline.py STEP[,STEP...] [target=DIR] [parts=DIR,DIR...] [KEY=VALUE...]
steps: {steps}
A step installs first where the target is empty. Common keys: minutes=8 results=DIR device=cuda
target: {target} by default; parts: the folders beside this script by default"""


class Problem(Exception):
    """A reason to stop the command. Its message is one line that says what to change."""


def default_target() -> str:
    return os.path.join(tempfile.gettempdir(), "gpufarm")


def main(argv: "list[str]") -> int:
    """Run `install` or a step, which replaces this process; return the exit code, 2 for bad input."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE.format(steps=" | ".join(STEPS), target=default_target()))
        return 0
    try:
        names = argv[0].split(",")
        unknown = [name for name in names if name not in STEPS]
        if unknown and names != ["install"]:
            raise Problem("unknown step {!r}; known: install, {}".format(unknown[0], ", ".join(STEPS)))
        values = keyed(argv[1:])
        target = os.path.abspath(values.pop("target", default_target()))
        given = values.pop("parts", None)
        if names == ["install"] and values:
            raise Problem(f"unknown argument {sorted(values)[0]!r}; valid are target=DIR, parts=DIR,DIR")
        for key in PATH_KEYS:
            if key in values:
                values[key] = os.path.abspath(values[key])
        is_step = names != ["install"]
        for line in install(target, part_folders(given)):
            print(line, flush=True)
        if is_step:
            start(target, argv[0], values)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except (OSError, tarfile.TarError, EOFError) as error:
        print(f"error: {error}; run the same command again", file=sys.stderr)
        return 1
    return 0


def keyed(arguments: "list[str]") -> "dict[str, str]":
    """Return KEY=VALUE arguments as a mapping of texts."""
    values = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not (key and equals and value):
            raise Problem(f"{argument!r} is not KEY=VALUE")
        values[key] = value
    return values


def part_folders(given: "str | None") -> "list[str]":
    """Return the folders of the parts: the given ones, or this script's folder and those beside it."""
    if given is not None:
        return [os.path.abspath(folder) for folder in given.split(",")]
    own_folder = os.path.dirname(os.path.abspath(__file__))
    beside = os.path.dirname(own_folder)
    others = [os.path.join(beside, name) for name in sorted(os.listdir(beside))]
    return [own_folder] + [
        folder for folder in others if folder != own_folder and os.path.exists(os.path.join(folder, MANIFEST))
    ]


def read_manifest(folders: "list[str]") -> "dict[str, Any]":
    """Return the manifest; every part has a copy of it."""
    manifest = {}  # type: dict[str, Any]
    for folder in folders:
        path = os.path.join(folder, MANIFEST)
        try:
            with open(path, encoding="utf-8") as file:
                own_manifest = json.load(file)
            bundle = own_manifest["bundle"]
            if own_manifest["format"] != FORMAT:
                raise ValueError("another format")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Problem(f"{folder} is not part of an offline bundle: {MANIFEST}: {error}") from error
        if manifest and bundle != manifest["bundle"]:
            raise Problem(f"{folders[0]} and {folder} are parts of different bundles; name one bundle's with parts=")
        manifest = own_manifest
    return manifest


def install(target: str, folders: "list[str]") -> "list[str]":
    """Check everything, then unpack missing archives into the target; return lines to print.

    The target appears whole or not at all.
    """
    manifest = read_manifest(folders)
    installed = installed_bundle(target)
    if installed not in (None, manifest["bundle"]):
        raise Problem(f"{target} holds another bundle; name another folder with target=")
    check_machine(manifest)
    archives = {
        name: archive for name, archive in manifest["archives"].items() if not os.path.isdir(unpacked_at(target, name))
    }
    if not archives:
        return [f"{target} holds all of the bundle"]
    if installed is None:
        check_torch(manifest)
    if "numpy" in archives and on_machine("numpy"):
        del archives["numpy"]
    paths = {}
    for name, archive in archives.items():
        candidates = [os.path.join(folder, name + ".tar.xz") for folder in folders]
        here = [path for path in candidates if os.path.exists(path)]
        if here:
            paths[name] = here[0]
            check_archive(here[0], archive)
        elif name in NEEDED:
            raise Problem(f"{archive['part']} is missing; it holds {NEEDED[name]}; name its folder with parts=")

    lines = []
    stage = target + ".gpufarm-partial" if installed is None else os.path.join(target, "partial")
    shutil.rmtree(stage, ignore_errors=True)
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # type: dict[str, Any]
    for name, path in paths.items():
        with tarfile.open(path, "r:xz") as content:
            content.extractall(stage, **options)
        packages = sorted(archives[name]["packages"].items())
        lines.append(f"installed {name}: " + ", ".join(f"{package} {version}" for package, version in packages))
    if installed is None:
        with open(os.path.join(stage, INSTALLED), "w", encoding="utf-8") as file:
            json.dump({"bundle": manifest["bundle"], "source": manifest["source"]}, file)
        os.rename(stage, target)
    elif paths:
        for name in paths:
            os.rename(unpacked_at(stage, name), unpacked_at(target, name))
        shutil.rmtree(stage)
    return lines


def installed_bundle(target: str) -> "str | None":
    """Return the identity of the bundle in the target; None if the target is empty or missing."""
    try:
        with open(os.path.join(target, INSTALLED), encoding="utf-8") as file:
            return str(json.load(file)["bundle"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError) as error:
        raise Problem(f"{target} cannot be used as target: {error}") from error
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise Problem(f"{target} is not empty and holds no install; name another folder with target=")
    return None


def unpacked_at(target: str, archive: str) -> str:
    """Return the folder that an installed archive has."""
    return os.path.join(target, "site" if archive == "core" else "site-" + archive)


def check_archive(path: str, archive: "dict[str, Any]") -> None:
    if os.path.getsize(path) != archive["bytes"] or file_sha256(path) != archive["sha256"]:
        part = archive["part"]
        raise Problem(f"{path} is damaged: size and SHA-256 are not the manifest's; copy {part} again")


def file_sha256(path: "str | os.PathLike[str]") -> str:
    with open(path, "rb") as file:  # a part has at most some tens of MiB
        return hashlib.sha256(file.read()).hexdigest()


def check_machine(manifest: "dict[str, Any]") -> None:
    """Raise `Problem` if the bundle was made for another machine or Python. Called every time."""
    machine, python = manifest["machine"], manifest["python"]
    if platform.system() != "Linux" or platform.machine() != machine:
        raise Problem(f"the bundle is for Linux on {machine}; this is {platform.system()} on {platform.machine()}")
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.implementation.name != "cpython" or version != python:
        raise Problem(
            f"the bundle is for CPython {python}; this is {sys.implementation.name} {version}: start offline.py "
            f"with python{python}, or make a bundle with PYTHON={version}"
        )
    libc, libc_version = platform.libc_ver()
    if libc != "glibc" or numbers(libc_version) < numbers(manifest["glibc"]):
        name = libc or "another C library"
        raise Problem(f"the wheels need glibc {manifest['glibc']} or newer; this machine has {name} {libc_version}")
    try:
        import lzma  # noqa: F401  (a Python that was built without it has no such module)
    except ImportError as error:
        raise Problem(f"{sys.executable} has no module lzma; start offline.py with a Python that has it") from error
    if importlib.util.find_spec("torch") is None:
        raise Problem(f"{sys.executable} has no torch; start offline.py with the Python that has it")
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
    from importlib import metadata

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def start(target: str, step: str, values: "dict[str, str]") -> None:
    """Replace this process by the step, so that it gets signals and sets the exit code."""
    folders = [unpacked_at(target, name) for name in ("core", "numpy", "ray")]
    paths = [folder for folder in folders if os.path.isdir(folder)] + [os.path.join(target, "source")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONUNBUFFERED="1")
    os.chdir(target)
    arguments = ["{}={}".format(*item) for item in values.items()]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "infra.offline.steps", step, *arguments], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
