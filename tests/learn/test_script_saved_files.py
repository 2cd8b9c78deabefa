"""Files that a script saves are found again under its path, while the user's files stay as they are."""

import builtins
import io
import os
import posix
import shutil
import subprocess
from pathlib import Path

import pytest

from learn.script import containment
from learn.script.containment import SavedFiles


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working folder of a script, in a process whose files are kept elsewhere."""
    replaced = [(os, name) for name in containment.FUNCTIONS]
    for owner, name in (*replaced, (builtins, "open"), (io, "open"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("supports_fd", "supports_follow_symlinks", "supports_dir_fd", "supports_effective_ids"):
        monkeypatch.setattr(os, name, set(getattr(os, name)))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    SavedFiles(tmp_path / "own" / "saved").install()
    return folder


def save(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def on_disk(folder):
    """The files that are really there, as another process finds them."""
    found = subprocess.run(["find", "-type", "f", "-printf", "%P\n"], cwd=folder, stdout=subprocess.PIPE, text=True)
    return sorted(found.stdout.split())


def test_a_file_that_is_saved_is_read_listed_copied_and_removed(work):
    save("run/one/weights.bin", "w")
    assert Path("run/one/weights.bin").read_text() == "w" and os.path.getsize("run/one/weights.bin") == 1
    assert list(os.walk("run")) == [("run", ["one"], []), ("run/one", [], ["weights.bin"])]
    assert [str(path) for path in Path().rglob("*.bin")] == ["run/one/weights.bin"]
    shutil.copytree("run/one", "run/two")
    shutil.rmtree("run/one")
    assert os.listdir("run") == ["two"] and not os.path.exists("run/one")
    with pytest.raises(FileNotFoundError):
        Path("run/one/weights.bin").read_text()
    assert on_disk(work) == []


def test_files_of_the_user_are_written_over_moved_and_removed_for_the_script_alone(work):
    for name in ("old.txt", "log.txt", "gone.txt"):
        with open(name, "w") as file:
            file.write(f"my {name}")

    def save_again():
        os.replace("old.txt", "older.txt")
        os.remove("gone.txt")
        with open("log.txt", "a") as file:
            file.write(", and more")

    save_again()
    assert sorted(os.listdir()) == ["log.txt", "older.txt"]
    assert Path("older.txt").read_text() == "my old.txt" and Path("log.txt").read_text() == "my log.txt, and more"
    Path("older.txt").write_text("new")
    descriptor = posix.open(str(work / "old.txt"), os.O_RDONLY)
    with os.fdopen(descriptor) as file:
        assert file.read() == "my old.txt"
    assert on_disk(work) == ["gone.txt", "log.txt", "old.txt"]


def test_what_is_not_saved_is_written_where_it_says(work):
    os.makedirs("data/prepared")
    Path("data/prepared/rows.txt").write_text("rows")
    os.rename("data/prepared/rows.txt", "data/prepared/all.txt")
    assert on_disk(work) == ["data/prepared/all.txt"]


def test_a_link_to_a_checkpoint_is_followed(work):
    save("step_1/weights.bin", "w")

    def save_link():
        os.symlink("step_1", "latest")

    save_link()
    assert Path("latest/weights.bin").read_text() == "w" and on_disk(work) == []
