"""Downloads on a bad disk, by several processes at once, and from publishers who break off."""

import errno
import functools
import http.server
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pooch
import pytest

import data
import data.download
from data.download import fetch

ROOT = Path(__file__).resolve().parents[2]
RING = np.arange(600), (np.arange(600) + 1) % 600
# Taken at import, before conftest's fixture puts all tests offline.
why_unreachable = data.download.why_unreachable


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setattr(data.download, "why_unreachable", lambda url: None)


def serve(monkeypatch, content, fails_with=None):
    def download(self, url, output_file, pooch):
        Path(output_file).write_bytes(content)
        if fails_with:
            raise fails_with

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", download)


class Slow(http.server.SimpleHTTPRequestHandler):
    """Keeps a list of the downloads, each of which takes a second."""

    asked: ClassVar[list[str]] = []

    def log_message(self, *_): ...

    def do_GET(self):
        self.asked.append(self.path)
        time.sleep(1)
        super().do_GET()


@pytest.fixture
def slow_site(tmp_path, monkeypatch):
    """URL and folder of a web server of this machine."""
    folder = tmp_path / "slow"
    folder.mkdir()
    Slow.asked.clear()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Slow, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()
    server.server_close()
    thread.join()


LOAD = """
import logging, sys
logging.basicConfig(level=logging.INFO)
sys.path.insert(0, sys.argv[1])
import data
print(data.load("pubmed", root=sys.argv[2], source="auto").meta.source)
"""


def test_two_processes_that_need_the_same_set_at_once(tmp_path, slow_site, write_planetoid):
    """Neither of them takes the surrogate, and the set is downloaded once."""
    url, folder = slow_site
    write_planetoid(tmp_path / "pubmed", *RING, 600, name="pubmed")
    (folder / "dataset").mkdir()
    with zipfile.ZipFile(folder / "dataset" / "pubmed.zip", "w") as opened:
        for file in (tmp_path / "pubmed").iterdir():
            opened.write(file, file.name)
    command = [sys.executable, "-c", LOAD, str(ROOT), str(tmp_path / "root")]
    options = {"env": {**os.environ, "DGL_REPO": url}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, text=True, **options) for _ in range(2)]
    ended = [process.communicate(timeout=300) for process in running]
    assert [out for out, _ in ended] == ["official\n"] * 2, ended
    assert Slow.asked == ["/dataset/pubmed.zip"]
    assert len(list((tmp_path / "root").iterdir())) == 1  # no lock, and nothing half


def test_fetches_of_one_archive_at_once(tmp_path, slow_site, reachable, caplog):
    url, folder = slow_site
    with zipfile.ZipFile(folder / "x.zip", "w") as opened:
        opened.writestr("hiv/a.txt", "a")
    target = tmp_path / "root" / "hiv"
    with caplog.at_level(logging.INFO, logger="data"), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(fetch, url + "x.zip", target, member="hiv") for _ in range(3)]
        assert [one.result() for one in waiting] == [None] * 3
    assert Slow.asked == ["/x.zip"]
    assert caplog.text.count(f"another process is downloading {target}; waiting for it, at most 60 minutes") == 2
    assert [path.name for path in target.parent.iterdir()] == ["hiv"]


HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from data.locks import only_one_process
with only_one_process(Path(sys.argv[2]), "testing", 1):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_waited_for_in_words_and_not_for_ever(tmp_path, monkeypatch, reachable, caplog):
    target, lock = tmp_path / "set.txt", tmp_path / ".set.txt.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(ROOT), str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(data.download, "WAIT_S", 0.5)
        with (
            caplog.at_level(logging.INFO, logger="data"),
            pytest.raises(data.DownloadError, match=r"another process is downloading .*wait for it, or end it"),
        ):
            fetch("https://there/set.txt", target)
        assert "waiting for it, at most" in caplog.text
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    serve(monkeypatch, b"0 1\n")
    fetch("https://there/set.txt", target)  # the lock ended with its process
    assert [path.name for path in tmp_path.iterdir()] == ["set.txt"]


def test_a_file_system_without_locks(tmp_path, monkeypatch, reachable):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("data.locks.fcntl.flock", none)
    serve(monkeypatch, b"0 1\n")
    fetch("https://there/set.txt", tmp_path / "set.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["set.txt"]


def test_auto_looks_again_before_it_takes_a_surrogate(tmp_path, monkeypatch, write_planetoid):
    """The network fails while another process puts the set in place."""

    def meanwhile(url):
        write_planetoid(data.info("pubmed").official.files(tmp_path)[0].target, *RING, 600, name="pubmed")
        return "ConnectionError"

    monkeypatch.setattr(data.download, "why_unreachable", meanwhile)
    assert data.load("pubmed", root=tmp_path).meta.source == "official"


@pytest.mark.parametrize("source", ["auto", "official"])
@pytest.mark.parametrize("root", ["file", "file/data", "/proc/data"])
def test_a_root_that_cannot_be_written(tmp_path, reachable, source, root):
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DownloadError, match="make room and set permissions, or choose another folder") as caught:
        data.load("pubmed", root=tmp_path / root, source=source)
    assert str(tmp_path / root) in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_while_downloading(tmp_path, monkeypatch, reachable, code):
    serve(monkeypatch, b"0 1\n", OSError(code, os.strerror(code)))
    with pytest.raises(data.DownloadError, match=r"set\.txt failed .*make room and set permissions, or choose another"):
        fetch("https://there/set.txt", tmp_path / "root" / "set.txt")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_server_that_drops_the_connection_may_answer_later(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(data.download, "why_unreachable", why_unreachable)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drop():
            with server.accept()[0] as connection:
                connection.recv(100)

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        with pytest.raises(data.DownloadError, match=r"cannot be reached \(the connection broke off\)"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}/x.txt", tmp_path / "x.txt")
        thread.join()
