"""Files are there whole or not at all, and a folder has one writer."""

import multiprocessing
import os
import signal

import pytest
from full_disk import full_after

from data.atomic import made_once, only_writer, replacing


@pytest.mark.parametrize("old", ["old", None])
def test_a_full_disk_leaves_what_was_there_and_names_the_file(tmp_path, old):
    path = tmp_path / "folder" / "a.txt"
    if old:
        with replacing(path) as unfinished:
            unfinished.write_text(old)
    said = r"a\.txt: cannot be written \(File too large\); what was there"
    with full_after(100), pytest.raises(OSError, match=said), replacing(path) as unfinished:
        unfinished.write_bytes(bytes(101))
    assert [(one.name, one.read_text()) for one in path.parent.iterdir()] == ([("a.txt", old)] if old else [])


def test_a_link_is_replaced_and_a_folder_is_not(tmp_path):
    (tmp_path / "victim").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "link") as unfinished:
        unfinished.write_text("new")
    assert ((tmp_path / "victim").read_text(), (tmp_path / "link").read_text()) == ("old", "new")
    with pytest.raises(OSError, match="is a folder, and is to be replaced by a file"), replacing(tmp_path):
        pytest.fail("the work begins")


def test_a_file_keeps_its_permissions(tmp_path):
    (tmp_path / "a").touch()
    for mode in (0o600, 0o664):
        (tmp_path / "a").chmod(mode)
        with replacing(tmp_path / "a") as unfinished:
            unfinished.write_text("new")
        assert (tmp_path / "a").stat().st_mode & 0o777 == mode


def make_and_die(making, path):
    with making(path) as unfinished:
        unfinished.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("making", [made_once, replacing])
def test_what_a_killed_process_left_is_removed(tmp_path, making):
    path = tmp_path / ("a" * 240)
    maker = multiprocessing.Process(target=make_and_die, args=(making, path))
    maker.start()
    maker.join()
    assert len([*tmp_path.glob(".writing-*/a*")]) == 1
    with making(path) as unfinished:
        unfinished.write_text("whole")
    assert [one.read_text() for one in tmp_path.iterdir() if one.suffix != ".lock"] == ["whole"]


def hold(folder, held):
    with only_writer(folder):
        held.set()
        (folder / ".writing-killed").mkdir()
        multiprocessing.Event().wait()


def test_a_folder_has_one_writer_which_is_named_until_it_is_killed(tmp_path):
    held = multiprocessing.Event()
    writer = multiprocessing.Process(target=hold, args=(tmp_path, held))
    writer.start()
    assert held.wait(60)
    try:
        said = rf"process {writer.pid} of {os.uname().nodename} writes there"
        with pytest.raises(OSError, match=said), only_writer(tmp_path):
            pytest.fail("a second writer")
    finally:
        writer.kill()
        writer.join()
    with only_writer(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_what_others_write_at_the_same_time_stays(tmp_path):
    """Other processes write the same file, and a run in a folder below."""
    (tmp_path / "run").mkdir()
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "run" / "b") as inner:
        first.write_text("first")
        inner.write_text("inner")
        with only_writer(tmp_path), replacing(tmp_path / "a") as second:
            second.write_text("second")
        assert (tmp_path / "a").read_text() == "second"
    assert [(tmp_path / name).read_text() for name in ("a", "run/b")] == ["first", "inner"]
