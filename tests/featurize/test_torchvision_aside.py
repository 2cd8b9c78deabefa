"""A torchvision of another build is kept aside: programs do not find it, models of gpufarm do."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra import install_torchvision

ROOT = Path(__file__).resolve().parents[2]
# Keeps the real one out, and has another prefix, where the test keeps one aside.
BLOCKED = """
import sys
sys.prefix = sys.argv[1]
sys.path[:] = [path for path in sys.path if path != ""]
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            aside = [path for path in sys.path if path.endswith("gpufarm/aside")]
            if not aside:
                raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
            return importlib.machinery.PathFinder.find_spec(name, aside)
sys.meta_path.insert(0, Blocked())
import importlib.machinery
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
"""


def run(code, place):
    environment_path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", environment_path + BLOCKED + code, str(place)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def place(tmp_path):
    aside = tmp_path / "a'; echo foo" / "share" / "gpufarm" / "aside"
    (aside / "torchvision").mkdir(parents=True)
    (aside / "torchvision" / "__init__.py").write_text("kept_aside = True\n")
    (aside / "torchvision" / "models.py").write_text("def net(): return 'a model'\n")
    (aside / "torchvision-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 9.9\n"
    (aside / "torchvision-9.9.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "a'; echo foo" / "a_users_models.py").write_text("from torchvision.models import net\n")
    return tmp_path / "a'; echo foo"


def test_a_program_does_not_find_what_is_kept_aside(place):
    assert "No module named 'torchvision'" in run("import torchvision", place).stderr


def test_models_of_the_library_and_of_a_user_find_it(place):
    done = run(
        "from featurize.nets.vision import import_library\nprint(import_library('torchvision.models').net())", place
    )
    assert done.stdout == "a model\n", done.stderr
    code = """
sys.path.append(sys.argv[1])
import importlib
from featurize.nets.vision import mending
print(mending(lambda: importlib.import_module("a_users_models")).net())
"""
    done = run(code, place)
    assert done.stdout == "a model\n", done.stderr


def test_without_any_the_message_says_how_to_get_one(tmp_path):
    code = "from featurize.nets.vision import import_library\nimport_library('torchvision.models')"
    said = run(code, tmp_path / "empty").stderr
    assert "torchvision is not installed" in said and "--index-url that torch came from" in said


@pytest.mark.parametrize("importable", [True, False])
def test_the_installer_keeps_aside_only_what_cannot_be_imported(importable, monkeypatch, tmp_path):
    calls = []

    def run_pip(command, **_):
        calls.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(install_torchvision.subprocess, "run", run_pip)
    monkeypatch.setattr(install_torchvision, "_is_importable", lambda: importable)
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(install_torchvision.importlib.metadata, "version", versions.get)
    assert install_torchvision.main(["--index-url", "http://localhost/cpu"]) == 0
    assert calls[0][-4:] == ["--index-url", "http://localhost/cpu", "torch==2.13.0", "torchvision"]
    assert len(calls) == (1 if importable else 3)
    aside = str(tmp_path / "share" / "gpufarm" / "aside")
    assert importable or ("uninstall" in calls[1] and aside in calls[2])
