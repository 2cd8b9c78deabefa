"""Files that a user names: plain ones in one step, links followed, devices and pipes as they are, no data's own."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from conf.errors import EnvironmentProblem, UsageError
from conf.files.outputs import checked_output, output_file, write_output
from farm.queue.jobs import Queue
from farm.serving.settings import ServeSettings
from farm.serving.traces import TraceStore
from warehouse.files.folder import DataFolder, FolderPlace


def test_a_plain_file_appears_whole_with_the_rights_of_the_one_before(place):
    target = place / "out"
    with output_file(target) as file:
        file.write(b"half")
        assert not target.exists()
    assert target.read_bytes() == b"half" and list(place.iterdir()) == [target]
    target.chmod(0o640)
    with pytest.raises(RuntimeError), output_file(target) as file:
        file.write(b"other")
        raise RuntimeError
    assert target.read_bytes() == b"half" and list(place.iterdir()) == [target]
    write_output(target, b"whole")
    assert target.read_bytes() == b"whole" and stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_link_is_followed_and_stays_a_link(place):
    target, link, last = place / "target", place / "link", place / "last"
    link.symlink_to("target")
    last.symlink_to("link")
    write_output(last, b"after")
    assert last.is_symlink() and target.read_bytes() == b"after" and not target.is_symlink()


def test_a_pipe_takes_the_bytes_and_stays_a_pipe(place):
    fifo, got = place / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write_output(fifo, b"x" * 200_000)
    reader.join(30)
    assert got == [b"x" * 200_000] and stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_takes_the_bytes_and_stays_a_device(place):
    write_output("/dev/null", b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    if os.path.exists("/dev/full"):
        with pytest.raises(EnvironmentProblem, match="out=/dev/full cannot be written: No space left on device"):
            write_output("/dev/full", b"rows\n" * 10_000)


@pytest.mark.parametrize("name", ["/dev/fd/1", "link"])
def test_standard_output_is_written_after_what_was_printed(place, name):
    if name == "link":
        (place / "link").symlink_to("/dev/stdout")
        name = str(place / "link")
    script = (
        "import sys; from conf.files.outputs import checked_output, write_output; print('first'); "
        "write_output(checked_output(sys.argv[1]), b'then\\n')"
    )
    piped = subprocess.run([sys.executable, "-c", script, name], capture_output=True, check=True)
    assert piped.stdout == b"first\nthen\n"
    with open(place / "log", "wb") as log:
        subprocess.run([sys.executable, "-c", script, name], stdout=log, check=True)
    assert (place / "log").read_bytes() == b"first\nthen\n"


@pytest.fixture
def whole(place):
    """A data folder in which every file and folder that the layout names exists, the databases open."""
    data = DataFolder.resolve(place / "data").create()
    store = TraceStore(data.service, ServeSettings())
    with Queue.open(data.queue):
        names = [name for name, value in vars(DataFolder).items() if isinstance(value, FolderPlace)]
        for path in (getattr(data, name) for name in names):
            if not path.exists() and path.suffix:
                path.write_bytes(b"precious")
            elif not path.exists():
                path.mkdir()
        for folder in [path for path in data.root.iterdir() if path.is_dir()]:
            (folder / "precious").write_bytes(b"precious")
        yield data
    store.close()


def test_no_file_of_a_data_folder_is_overwritten(whole):
    files = [path for path in whole.root.rglob("*") if path.is_file()]
    assert {"service.sqlite", "service.sqlite-wal", "queue.sqlite-wal"} < {path.name for path in files}
    for own in files:
        with pytest.raises(UsageError, match=r"out=.* it is a file of the data folder"):
            checked_output(own)
    (whole.root / "format.json").write_text("[" * 100_000)  # and not where the folder is damaged
    with pytest.raises(UsageError, match=r"out=.* it is a file of the data folder"):
        checked_output(whole.queue)


@pytest.mark.parametrize("name", ["service.sqlite", "machines/precious", "runs/precious"])
def test_a_data_folders_own_files_are_refused_however_they_are_named(place, whole, name, monkeypatch):
    own = whole.root / name
    before = own.read_bytes()
    (place / "to_file").symlink_to(own)
    (place / "to_folder").symlink_to(own.parent)
    monkeypatch.chdir(own.parent)
    for out in (own, own.name, place / "to_file", place / "to_folder" / own.name):
        with pytest.raises(UsageError, match=r"report=.* it is a file of the data folder"):
            write_output(out, b"x", key="report")
    with open(own, "rb") as file, pytest.raises(UsageError, match="data folder"):
        write_output(f"/dev/fd/{file.fileno()}", b"x")
    os.link(own, place / "hard")
    write_output(place / "hard", b"x")
    assert own.read_bytes() == before, "the other name of a file keeps its content"


def test_a_users_file_beside_the_data_is_written(place):
    data = DataFolder.resolve(place / "data").create()
    write_output(data.root / "mine.csv", b"x")
    assert (data.root / "mine.csv").read_bytes() == b"x"


@pytest.mark.parametrize(("out", "why"), [("", ""), ("~", "it is a folder"), ("a\0b", ""), ("/none/a", "")])
def test_what_cannot_be_a_file_is_refused_before_any_work(out, why):
    with pytest.raises(UsageError, match=f"^out=.*{why}"):
        checked_output(out)


@pytest.mark.parametrize("inside", ["", "compactions/runs/new"])
@pytest.mark.parametrize(
    ("command", "arguments"), [("export", []), ("publish", ["licence=CC0", "sources=[simulated]"])]
)
def test_no_folder_of_files_is_made_within_a_data_folder(tmp_path, refused, command, arguments, inside):
    data = DataFolder(tmp_path / "a'; echo foo").create()
    before = sorted(data.root.rglob("*"))
    link = tmp_path / "link"
    link.symlink_to(data.root)
    for out in (data.root / inside, link / inside):
        assert "belongs to the data folder" in refused(command, f"out={out}", f"data={data.root}", *arguments)
    assert sorted(data.root.rglob("*")) == before
