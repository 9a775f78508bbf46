"""Downloads from a server on this machine: complete and in place, or absent."""

import hashlib
import io
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import data
from data.download import fetch

CONTENT = b"0 1\n1 2\n"


@pytest.fixture
def server(monkeypatch):
    """Serves `files` {path: bytes, or a status}; `requests` lists the paths that were asked for."""
    monkeypatch.undo()  # of "offline"
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests.append(self.path)
            found = self.server.files.get(self.path, 404)
            status, content = (found, b"") if isinstance(found, int) else (200, found)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.files, made.requests, made.url = {}, [], f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def shown(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def zip_of(members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tar_of(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize("archive", ["", ".zip", ".tar.gz"])
def test_a_file_and_the_member_of_an_archive(tmp_path, server, archive):
    members = {"set/edges.txt": CONTENT, "set/other.txt": b"-"}
    server.files[f"/edges{archive}"] = {"": CONTENT, ".zip": zip_of(members), ".tar.gz": tar_of(members)}[archive]
    digest = hashlib.sha256(server.files[f"/edges{archive}"]).hexdigest()
    for _ in range(2):  # an existing file is not fetched again
        fetch(f"{server.url}/edges{archive}", tmp_path / "a" / "edges.txt", "set/edges.txt", f"sha256:{digest}")
    assert (tmp_path / "a" / "edges.txt").read_bytes() == CONTENT
    assert (shown(tmp_path / "a"), len(server.requests)) == (["edges.txt"], 1)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (404, data.DatasetMissingError, "cannot be downloaded .HTTP 404"),
        (503, data.DownloadError, "cannot be downloaded .HTTP 503"),
        (b"<!DOCTYPE html><html>quota exceeded</html>", data.DownloadError, "a web page arrived in place of the file"),
        (b"other content", data.DownloadError, "the download failed .*does not match the known hash"),
    ],
)
def test_nothing_is_kept_of_a_failed_download(tmp_path, server, answer, error, message):
    server.files["/edges.txt"] = answer
    known = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}" if answer == b"other content" else ""
    with pytest.raises(error, match=message) as caught:
        fetch(f"{server.url}/edges.txt", tmp_path / "edges.txt", known_hash=known)
    assert isinstance(caught.value, data.DownloadError) == (error is data.DownloadError)
    assert shown(tmp_path) == []


def test_an_archive_without_the_member_and_one_that_leads_out(tmp_path, server):
    server.files |= {"/a.zip": zip_of({"other.txt": CONTENT}), "/b.tar.gz": tar_of({"../out.txt": CONTENT})}
    with pytest.raises(data.DownloadError, match=r"the archive holds no edges\.txt"):
        fetch(f"{server.url}/a.zip", tmp_path / "in" / "edges.txt", "edges.txt")
    with pytest.raises(tarfile.OutsideDestinationError):
        fetch(f"{server.url}/b.tar.gz", tmp_path / "in" / "b")
    assert shown(tmp_path / "in") == []
    assert not (tmp_path / "out.txt").exists()


def test_two_processes_fetch_a_file_once(tmp_path, server):
    server.files["/edges.txt"] = CONTENT
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: fetch(f"{server.url}/edges.txt", tmp_path / "edges.txt"), range(4)))
    assert (shown(tmp_path), server.requests) == (["edges.txt"], ["/edges.txt"])


def test_pyg_downloads_through_here(tmp_path, server, monkeypatch):
    """Whole or not at all, and by the same errors."""
    import torch_geometric.datasets as pyg

    monkeypatch.setattr(pyg.HeterophilousGraphDataset, "url", server.url)
    with pytest.raises(data.DatasetMissingError, match=r"questions: not under .*questions\.npz: .*HTTP 404"):
        data.load("questions", root=tmp_path, source="official")
    assert shown(tmp_path) == []
    server.files["/questions.npz"] = 503
    with pytest.raises(data.DownloadError, match=r"questions: not under"):
        data.load("questions", root=tmp_path)  # not the surrogate
    assert server.requests == ["/questions.npz"] * 2
