"""Temporary folders of dead processes go; those of the living, of others, and what links lead to stay."""

import os

import pytest

from conf.files.identity import OWNER_FILE
from farm.queue.leftovers import delete_folder, make_folder, make_ray_folder, sweep_folders

DAY_S = 86_400.0
LATER = 4e9  # seconds since the epoch: long after any folder of this test was made


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "a'; echo foo"
    path.mkdir()
    return path


def folder_of(base, owner, name="gpufarm-trial-1"):
    path = base / name
    path.mkdir(mode=0o700)
    (path / "server.log").write_text("x")
    if owner is not None:
        (path / OWNER_FILE).write_text(owner)
    return path


def test_the_folder_of_a_dead_process_goes_whatever_its_age(base, dead):
    path = folder_of(base, dead)
    (path / "deep").mkdir()
    (path / "deep" / "file").write_text("x")
    assert sweep_folders([base], now=0.0) == [path]
    assert not path.exists()


def test_the_folder_of_a_living_process_stays_whatever_its_age(base):
    path = make_folder("gpufarm-ray-", base)
    assert sweep_folders([base], now=LATER) == []
    assert path.exists() and path.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_namespace_stays(base, dead):
    pid, start, where = dead.split("@")
    folder_of(base, f"{pid}@{start}@{where.partition('.')[0]}.1")
    assert sweep_folders([base], now=LATER) == []


@pytest.mark.parametrize("owner", [None, "", "junk", "1@1@00000000.1"])
def test_a_folder_without_an_owner_or_of_an_earlier_boot_stays_for_a_day(base, owner):
    path = folder_of(base, owner)
    made = path.stat().st_mtime
    assert sweep_folders([base], now=made + DAY_S - 60) == []
    assert sweep_folders([base], now=made + DAY_S + 60) == [path]


def test_an_old_folder_without_an_owner_that_a_process_uses_stays(base):
    path = folder_of(base, None)
    with open(path / "server.log"):
        assert sweep_folders([base], now=LATER) == []
    assert sweep_folders([base], now=LATER) == [path]


def test_other_folders_and_files_stay(base, dead):
    folder_of(base, dead, "gpufarm-data")
    folder_of(base, dead, "mine")
    (base / "gpufarm-trial-file").write_text("x")
    assert sweep_folders([base], now=LATER) == []


def test_no_link_is_followed(base, dead, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    (precious / OWNER_FILE).write_text(dead)
    (base / "gpufarm-trial-link").symlink_to(precious)
    path = folder_of(base, dead)
    (path / "link").symlink_to(precious)
    (path / "file-link").symlink_to(precious / "file")
    assert sweep_folders([base], now=LATER) == [path]
    assert (precious / "file").read_text() == "mine" and (base / "gpufarm-trial-link").is_symlink()


def test_an_owner_behind_a_link_is_none(base, dead, tmp_path):
    (tmp_path / "claim").write_text(dead)
    path = folder_of(base, None)
    (path / OWNER_FILE).symlink_to(tmp_path / "claim")
    assert sweep_folders([base], now=path.stat().st_mtime) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_stays(base, dead):
    path = folder_of(base, dead)
    os.chown(path, 65534, 65534)
    assert sweep_folders([base], now=LATER) == []
    assert not delete_folder(path) and path.exists()


def test_a_base_that_is_not_there_is_no_error(base):
    assert sweep_folders([base / "nowhere"]) == []


def test_a_rays_folder_stands_where_its_sockets_paths_are_short_enough(base, monkeypatch):
    deep = base / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    path = make_ray_folder()
    assert path.parent.as_posix() == "/tmp"
    assert delete_folder(path)
