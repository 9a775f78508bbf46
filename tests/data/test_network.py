"""`pytest -m network tests/data/test_network.py`: every address answers, and every archive lists what its loader reads.

No file is downloaded: of a .zip the directory at its end is read, of a .tar.gz the beginning, of others
the first bytes.
"""

import functools
import http.server
import io
import re
import tarfile
import threading
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

import data
from data.download import MAGIC

TIMEOUT_S = 60
TAR_BYTES = 2**28  # of a .tar.gz that are looked through


class Remote(io.RawIOBase):
    """A file of a server that serves ranges, as a file that can be read anywhere; the last 64 KiB are read at once."""

    def __init__(self, url):
        self.url, self.place = url, 0
        answer = requests.get(url, headers={"Range": "bytes=-65536"}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        assert answer.status_code == 206, f"{url}: serves no ranges"
        self.size = int(answer.headers["Content-Range"].rpartition("/")[2])
        self.end, self.start_of_end = answer.content, self.size - len(answer.content)

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.place

    def seek(self, offset, whence=io.SEEK_SET):
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer):
        last = min(self.place + len(buffer), self.size)
        if last <= self.place:
            return 0
        if self.place >= self.start_of_end:
            content = self.end[self.place - self.start_of_end : last - self.start_of_end]
        else:
            answer = requests.get(self.url, headers={"Range": f"bytes={self.place}-{last - 1}"}, timeout=TIMEOUT_S)
            answer.raise_for_status()
            content = answer.content
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)


def members_of_zip(url):
    with zipfile.ZipFile(io.BufferedReader(Remote(url), 2**16)) as archive:
        return archive.namelist()


def has_member_of_tar(url, member):
    with requests.get(url, stream=True, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        with tarfile.open(fileobj=answer.raw, mode="r|gz") as archive:
            for entry in archive:
                if entry.name.removeprefix("./").startswith(member):
                    return True
                if entry.offset > TAR_BYTES:
                    return False
    return False


def starts_with(url, count):
    with requests.get(url, stream=True, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        return next(answer.iter_content(count))


def published():
    """(name of the set, remote) of all files that are downloaded."""
    for name in data.names():
        for remote in data.info(name).official.files(Path("root")):
            if remote.url:
                yield pytest.param(remote, id=f"{name}-{remote.target.name}")


def is_there(remote):
    path = urlsplit(remote.url).path
    if path.endswith(".zip"):
        members = members_of_zip(remote.url)
        folder = f"{remote.member}/" if remote.member else ""
        return any(name == remote.member or name.startswith(folder) for name in members)
    if path.endswith((".tar.gz", ".tgz")):
        return has_member_of_tar(remote.url, remote.member)
    start = starts_with(remote.url, 64)
    return start.startswith(MAGIC.get(remote.target.suffix, b"")) and not start.lstrip().startswith(b"<")


@pytest.mark.network
@pytest.mark.parametrize("remote", list(published()))
def test_every_file_is_published_as_its_loader_expects(remote):
    assert is_there(remote), f"{remote.url}: {remote.member or remote.target.suffix} is not there"


@pytest.mark.network
def test_checksums_of_igb_are_those_of_its_own_script():
    script = "https://raw.githubusercontent.com/IllinoisGraphBenchmark/IGB-Datasets/main/igb/download.py"
    text = requests.get(script, timeout=TIMEOUT_S).text
    for name in ("igb-small", "igb-medium"):
        (remote,) = data.info(name).official.files(Path("root"))
        assert remote.url in text
        assert re.search(remote.known_hash.removeprefix("md5:"), text)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves ranges, as publishers' servers do."""

    def log_message(self, *_): ...

    def do_GET(self):
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return super().do_GET()
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        first = int(asked[1]) if asked[1] else max(0, len(content) - int(asked[2]))
        last = int(asked[2]) if asked[1] else len(content) - 1
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranges, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_check_itself_on_a_server_of_this_machine(tmp_path, site):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("hiv/raw/edge.csv.gz", bytes(200_000))  # the directory lies behind the last 64 KiB's start
        for number in range(900):
            archive.writestr(f"hiv/mapping/{number:090}", "")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("small/processed/paper/node_feat.npy")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    (tmp_path / "e.txt.gz").write_bytes(b"\x1f\x8b and so on")
    (tmp_path / "page.txt.gz").write_bytes(b"<html>")

    def remote(file, member, target="set"):
        return data.sources.base.Remote(site + file, Path(target), member)

    assert len(members_of_zip(site + "x.zip")) == 901
    assert is_there(remote("x.zip", "hiv"))
    assert is_there(remote("x.zip", "hiv/raw/edge.csv.gz"))
    assert not is_there(remote("x.zip", "pcba"))
    assert is_there(remote("x.tar.gz", "small"))
    assert not is_there(remote("x.tar.gz", "medium"))
    assert is_there(remote("e.txt.gz", "", "e.txt.gz"))
    assert not is_there(remote("page.txt.gz", "", "e.txt.gz"))
    with pytest.raises(requests.HTTPError):
        is_there(remote("gone.zip", "hiv"))


def test_every_download_of_the_registry_is_checked():
    checked = {param.values[0].url for param in published()}
    assert len(checked) >= 35
    assert all(url.startswith(("http://", "https://")) for url in checked)
