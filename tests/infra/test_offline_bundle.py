"""`make offline`: wheels for another Python, parts under a limit, and the script that installs them without a network.

The wheels and torch are small stand-ins here, and so is the step; `tests/faults/test_offline_rehearsal.py` takes the
real ones.
"""

import ast
import contextlib
import importlib.util
import io
import json
import logging
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from conf.cli.command_line import help_text
from conf.errors import EnvironmentProblem
from infra import collect
from infra.offline import bundle as bundles, launch, page, steps
from infra.offline.bundle import BundleSettings, needed_packages
from tests.surroundings import await_
from workers.probes import children

PYTHON = "{}.{}".format(*sys.version_info)
TAG = f"cp{PYTHON.replace('.', '')}"
# Name, tag and requirements of the wheels on the stand-in for an index; releases are the pinned ones.
COMPILED = "manylinux_2_28_x86_64"
WHEELS = {
    "pyarrow": (f"{TAG}-{TAG}-{COMPILED}", ()),
    "duckdb": (f"{TAG}-abi3-{COMPILED}", ()),
    "hydra_core": ("py3-none-any", ("omegaconf<2.4", "antlr4-python3-runtime==4.9.*", "packaging")),
    "omegaconf": ("py3-none-any", ("antlr4-python3-runtime==4.9.*", "PyYAML>=5.1.0")),
    "antlr4_python3_runtime": ("py3-none-any", ()),
    "pyyaml": (f"{TAG}-{TAG}-manylinux2014_x86_64", ()),
    "packaging": ("py3-none-any", ()),
    "psutil": (f"cp36-abi3-{COMPILED}", ()),
    "nvidia_ml_py": ("py3-none-any", ()),
    "rich": ("py3-none-any", ('pygments; python_version >= "3.8"', 'colorama; sys_platform == "win32"')),
    "pygments": ("py3-none-any", ()),
    "prometheus_client": ("py3-none-any", ()),
    "pytest": ("py3-none-any", ("packaging", 'attrs; extra == "dev"')),
    "numpy": (f"{TAG}-{TAG}-{COMPILED}", ()),
    "ray": (f"{TAG}-{TAG}-{COMPILED}", ("filelock", "msgpack", "protobuf")),
    "protobuf": ("py3-none-any", ()),
    "msgpack": (f"{TAG}-{TAG}-manylinux2014_x86_64", ()),
    **dict.fromkeys(("filelock", "fsspec", "jinja2"), ("py3-none-any", ())),  # which torch brings
}
VERSIONS = dict(line.split("==") for line in bundles.CONSTRAINTS.read_text().splitlines() if "==" in line)
VERSIONS |= {"antlr4-python3-runtime": "4.9.3", "fsspec": "2026.1"}
STEP = """
import json, os, sys
import duckdb
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "duckdb": duckdb.__file__}), flush=True)
sys.exit(7)
"""


def write_wheel(folder, name, tag, requires=(), files=(), version=None):
    version = version or VERSIONS.get(name.replace("_", "-"), "30.0")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        for path, content in files:
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, content)
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}-{version}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        record = "".join(f"{path},,\n" for path in [*wheel.namelist(), f"{name}-{version}.dist-info/RECORD"])
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", record)


@pytest.fixture(scope="module")
def index(tmp_path_factory, module_patch):
    """A folder of wheels that pip takes for all there is."""
    folder = tmp_path_factory.mktemp("index")
    content = random.Random(0).randbytes(3 << 20)
    files = {
        "ray": [
            ("ray/raylet", content),
            ("ray/jars/ray_dist.jar", content),
            ("ray-1.data/scripts/ray", b""),
            ("ray-1.data/purelib/ray/more.py", b""),
        ],
        "pyarrow": [
            ("pyarrow/include/arrow.h", b""),
            ("pyarrow/libarrow_flight.so.1", b""),
            ("pyarrow/libarrow_substrait.so.1", b"\0libarrow_s3.so.1\0"),
            ("pyarrow/libarrow_s3.so.1", b""),
            ("pyarrow/lib.so", b"\0libarrow_substrait.so.1\0"),
        ],
    }
    for name, (tag, requires) in WHEELS.items():
        write_wheel(folder, name, tag, requires, files.get(name, ()))
    write_wheel(folder, "duckdb", "cp39-cp39-win_amd64", version="99.0")
    module_patch.setenv("PIP_NO_INDEX", "1")
    module_patch.setenv("PIP_FIND_LINKS", str(folder))
    module_patch.delenv("PIP_INDEX_URL", raising=False)
    return folder


def pip_here(command, *arguments):
    """Run pip in this process: a start of pip takes longer than most of the calls.

    As it starts, pip shuts down all handlers of logging, of which that of absl closes pytest's stream, and puts its own
    in their place.
    """
    from pip._internal.cli.main import main

    words = [command, "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    with (
        contextlib.redirect_stderr(io.StringIO()) as errors,
        mock.patch("logging.shutdown"),
        mock.patch.object(logging.getLogger(), "handlers", []),
    ):
        return subprocess.CompletedProcess(words, main(words), "", errors.getvalue())


@pytest.fixture(scope="module")
def parts(index, tmp_path_factory, module_patch):
    """A bundle for this Python, with the smaller part of the source, compressed fast."""
    folder = tmp_path_factory.mktemp("made") / "offline"
    module_patch.setattr(bundles, "_pip", pip_here)
    module_patch.setattr(bundles, "_XZ", {"preset": 0})
    module_patch.setattr(bundles, "_SOURCE_LEFT_OUT", ("[!i]*", "infra/g*", "infra/k*"))
    return folder, bundles.bundle(BundleSettings(python=PYTHON, mib=4, out=str(folder)))


@pytest.fixture(autouse=True)
def machine(tmp_path_factory, monkeypatch):
    """The folder of a machine's Python modules, with a stand-in for torch."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("__version__ = '2.99.0+cu130'\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def offline(part, *arguments, **surroundings):
    command = [sys.executable, str(part / "offline.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **surroundings)


@pytest.fixture
def refusal(capsys):
    """The one line of a call that is refused."""

    def call(*arguments):
        assert launch.main([*map(str, arguments)]) == 2
        output, error = capsys.readouterr()
        (line,) = error.splitlines()
        assert not output
        return line

    return call


def manifest_of(part):
    return json.loads((part / "manifest.json").read_text())


def test_every_part_is_under_the_limit_and_the_first_holds_all_but_ray(parts):
    folder, table = parts
    assert sorted(part.name for part in folder.iterdir()) == ["part-1", "part-2"]
    for part in folder.iterdir():
        assert sum(file.stat().st_size for file in part.iterdir()) <= 4 << 20
        assert manifest_of(part) == manifest_of(folder / "part-1")
    archives = manifest_of(folder / "part-1")["archives"]
    assert {name: archive["part"] for name, archive in archives.items()} == bundles.PARTS
    of_core = {name.replace("_", "-") for name in WHEELS} - {"numpy", "ray", "protobuf", "filelock", "fsspec", "jinja2"}
    assert [archives[name]["packages"].keys() for name in ("core", "ray")] == [of_core, {"ray", "protobuf"}]
    assert any("/part-2: ray: 3.0 MiB" in line for line in table)


def test_installed_without_network_a_step_runs_on_what_the_parts_brought(parts, tmp_path):
    folder, _ = parts
    target = tmp_path / "a b" / "target"
    target.parent.mkdir()
    done = offline(folder / "part-1", "install", f"target={target}", f"parts={folder / 'part-1'}")
    assert done.returncode == 0, done.stderr
    assert "installed core: antlr4-python3-runtime 4.9.3, duckdb " in done.stdout and "ray" not in done.stdout
    (core,) = target.iterdir()  # this Python has NumPy
    assert core.name == f"core-{manifest_of(folder / 'part-1')['archives']['core']['sha256'][:16]}", "its content's"
    site, source = core / "site", core / "source"
    assert (site / "pyarrow" / "__init__.py").exists() and (source / "infra" / "cron").exists()
    libraries = {path.name for path in (site / "pyarrow").iterdir()} - {"__init__.py"}
    assert libraries == {"lib.so", "libarrow_substrait.so.1", "libarrow_s3.so.1"}, "what another one names, and no more"
    (source / "infra" / "offline" / "steps.py").write_text(STEP)
    words = ("test,collect", "minutes=8", "results=out", f"target={target}")
    done = offline(folder / "part-1", *words, cwd=tmp_path, env={**os.environ, "PATH": ""})
    report = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, report["cwd"]) == (7, str(target)) and report["duckdb"].startswith(f"{site}/")
    assert report["argv"] == ["steps=[test,collect]", "minutes=8", f"results={tmp_path}/out"]
    # All parts lie beside the script that time, so Ray is added.
    assert "installed ray: protobuf 30.0, ray " in done.stdout
    (ray,) = target.glob("ray-*/site/ray")
    assert os.access(ray / "raylet", os.X_OK) and (ray / "more.py").exists() and not (ray / "jars").exists()


def test_an_install_killed_in_the_middle_starts_again_and_an_archive_is_whole_or_not_there(parts, tmp_path):
    folder, _ = parts
    target = tmp_path / "target"
    command = [sys.executable, folder / "part-1" / "offline.py", "install", f"target={target}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        await_(lambda: target.exists() or process.poll() is not None, "an install that has begun")
        process.kill()
    installed = target.glob("core-*[0-9a-f]")  # what is unpacked when the kill comes is named otherwise
    assert all((core / "source/infra/offline/launch.py").exists() for core in installed)
    assert offline(folder / "part-1", "install", f"target={target}").returncode == 0
    assert [path.name[:4] for path in sorted(target.iterdir())] == ["core", "ray-"]
    assert list(target.glob("core-*[0-9a-f]/source/infra/offline/launch.py"))


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"machine": "riscv64"}, "the bundle is for Linux on riscv64; this is Linux on "),
        ({"python": "3.99"}, "the bundle is for CPython 3.99; this is cpython "),
        ({"torch": "3.0"}, "torch 2.99.0+cu130 is too old; 3.0 or newer is needed"),
        (
            {"expects": ["jinja2", "no-such-thing"]},
            "this Python lacks no-such-thing, which the bundle expects here; install it, or",
        ),
        ({"format": 99}, "is not part of an offline bundle: manifest.json: another format"),
    ],
)
def test_another_machine_is_refused_in_one_line_before_anything_is_copied(parts, refusal, tmp_path, change, expected):
    folder, _ = parts
    part = tmp_path / "part-1"
    part.mkdir()
    for file in (folder / "part-1").iterdir():
        os.link(file, part / file.name)
    (part / "manifest.json").unlink()
    (part / "manifest.json").write_text(json.dumps({**manifest_of(folder / "part-1"), **change}))
    assert expected in refusal("install", f"target={tmp_path / 'target'}", f"parts={part}")
    assert not (tmp_path / "target").exists()


def test_a_python_whose_torch_cannot_be_imported_is_refused(parts, machine, tmp_path):
    (machine / "torch" / "__init__.py").write_text("raise ImportError('libcuda is missing')")
    done = offline(parts[0] / "part-1", "install", f"target={tmp_path / 'target'}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "cannot import torch: ImportError: libcuda is missing; start offline.py with the Python that" in done.stderr
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("module", ["torch", "_lzma"])
def test_a_python_without_torch_or_lzma_is_refused(parts, refusal, tmp_path, monkeypatch, module):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    words = refusal("install", f"target={tmp_path / 'target'}", f"parts={parts[0] / 'part-1'}")
    assert f"{sys.executable} has no " in words and module.strip("_") in words


def test_a_missing_or_torn_archive_is_refused_and_nothing_copied(parts, refusal, tmp_path):
    folder, _ = parts
    target, part = tmp_path / "target", tmp_path / "part-1"
    part.mkdir()
    os.link(folder / "part-1" / "manifest.json", part / "manifest.json")
    command = ("install", f"target={target}", f"parts={part}")
    assert refusal(*command) == "error: part-1 is missing; it holds what every step needs; name its folder with parts="
    *content, last = (folder / "part-1" / "core.tar.xz").read_bytes()
    for damaged in (content, [*content, last ^ 1]):
        (part / "core.tar.xz").write_bytes(bytes(damaged))
        assert "core.tar.xz is damaged" in refusal(*command)
    assert not target.exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["colect", "parts={part}"], "unknown step 'colect'; known: install, test, calibrate,"),
        (["install", "minutes=1", "parts={part}"], "unknown argument 'minutes=1'; valid are target=DIR, parts=DIR,DIR"),
        (["install", "parts=/nowhere"], "/nowhere is not part of an offline bundle"),
        (["install", f"target={Path(__file__).parent}", "parts={part}"], "is not empty and holds no install"),
        (["install", f"target={__file__}", "parts={part}"], "is not empty and holds no install"),
        (["collect", "minutes", "parts={part}"], "'minutes' is not KEY=VALUE"),
        (["collect", "results=", "parts={part}"], "'results=' is not KEY=VALUE"),
    ],
)
def test_bad_input_of_the_script_is_one_line(parts, refusal, arguments, expected):
    assert expected in refusal(*(text.format(part=parts[0] / "part-1") for text in arguments))


def test_the_script_alone_says_how_it_is_used_and_an_old_python_can_read_it(parts):
    script = parts[0] / "part-1" / "offline.py"
    done = offline(script.parent)
    assert done.returncode == 0 and "steps: test | calibrate | allocator | bench | collect" in done.stdout
    ast.parse(script.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["python=2.7"], "python= must be 3.11 or newer, got 2.7"),
        (["python=3.10"], "python= must be 3.11 or newer, got 3.10"),
        (["python=python3"], "python= must be the machine's release of Python, as 3.12, got 'python3'"),
        (["mib=60"], "python= must be the machine's release of Python"),
        (["python=3.12", "mib=0"], "mib"),
        (["python=3.12", "size=60"], "unknown key 'size'; valid keys: python, mib, present, out, ray"),
        (["python=3.12", "out=conf"], "out='conf' is not a former bundle; name a new folder"),
        (["python=3.12", "present=/no/list.txt"], "present='/no/list.txt' cannot be read"),
        (["python=3.12", "present=Makefile"], "which is no line of `pip list --format=freeze`"),
    ],
)
def test_bad_input_of_make_offline_is_one_line(arguments, expected, refused, monkeypatch):
    monkeypatch.chdir(bundles.ROOT)
    assert expected in refused("infra.offline.bundle:BundleSettings", *arguments)


@pytest.mark.parametrize(
    ("program", "settings", "key"),
    [
        (bundles, "BundleSettings", "python=null"),
        (page, "PageSettings", "results=(required)"),
        (children, "ProbesSettings", "out="),
        (steps, "StepsSettings", "minutes="),
        (collect, "CollectSettings", "n=420"),
    ],
)
def test_a_command_of_no_table_explains_itself_and_its_keys(program, settings, key):
    first, *lines = help_text(f"{program.__name__}:{settings}", everything=False).splitlines()
    assert first == program.__doc__.splitlines()[0] and any(line.startswith(f"  {key}") for line in lines)


@pytest.mark.wide
def test_a_wheel_that_is_missing_for_the_machine_is_named(index, tmp_path):
    with pytest.raises(EnvironmentProblem, match=r"no wheel for Python 3\.10 on x86_64: .*duckdb>=1\.1"):
        needed_packages([Requirement("duckdb>=1.1")], "3.10", {}, tmp_path / "site")


def test_what_the_machine_has_is_left_out_where_its_release_fits(index, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text(
        "rich==1.0\npackaging==23.0\n# comment\npygments @ file:///a/b\n-e /some/where\ndistro-info==1.1build1\n"
    )
    on_machine = bundles.packages_present(str(listed))
    wheels, expected = needed_packages([Requirement("rich>=13.7")], PYTHON, on_machine, tmp_path / "site")
    assert (list(wheels), expected) == (["rich"], {"pygments"}), "1.0 is too old"


def test_a_former_bundle_is_replaced_and_a_failed_one_leaves_nothing(parts, tmp_path, monkeypatch):
    out = tmp_path / "offline"
    (out / "part-1").mkdir(parents=True)
    (out / "part-1" / "manifest.json").write_text("{}")

    def missing(*arguments):
        raise EnvironmentProblem("no wheel")

    monkeypatch.setattr(bundles, "needed_packages", missing)
    with pytest.raises(EnvironmentProblem, match="no wheel"):
        bundles.bundle(BundleSettings(python=PYTHON, out=str(out)))
    assert [path.name for path in tmp_path.iterdir()] == ["offline"]
    assert (out / "part-1" / "manifest.json").read_text() == "{}"
