import functools
import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import time
import zipfile

import numpy as np
import pooch
import pytest
import requests

import data
import data.download
from data.download import fetch

# Taken at import, before conftest's fixture puts all tests offline.
why_unreachable = data.download.why_unreachable


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setattr(data.download, "why_unreachable", lambda url: None)


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "served.zip"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("hiv/a.txt", "a" * 1000)
        opened.writestr("hiv/raw/b.txt", "b")
    return path


def serve(monkeypatch, content, fails_with=None):
    def download(self, url, output_file, pooch):
        with open(output_file, "wb") as file:
            file.write(content)
        if fails_with:
            raise fails_with

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", download)


@pytest.mark.parametrize(("member", "inside"), [("hiv", "raw/b.txt"), ("", "hiv/raw/b.txt")])
def test_whole_archive_is_put_in_place(tmp_path, monkeypatch, reachable, archive, member, inside):
    serve(monkeypatch, archive.read_bytes())
    fetch("https://there/x.zip", tmp_path / "root" / "target", member=member)
    assert (tmp_path / "root" / "target" / inside).read_text() == "b"
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["target"]


def test_interrupted_download_leaves_nothing(tmp_path, monkeypatch, reachable, archive):
    for failure in (requests.ConnectionError("reset"), OSError("disk full")):
        serve(monkeypatch, archive.read_bytes()[:60], failure)
        with pytest.raises(data.DatasetMissingError, match=r"https://there/x\.zip.*nothing was kept"):
            fetch("https://there/x.zip", tmp_path / "root" / "target")
    serve(monkeypatch, archive.read_bytes()[:60], KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fetch("https://there/x.zip", tmp_path / "root" / "target")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("kind", ["truncated", "corrupt", "page", "member"])
def test_wrong_content_leaves_nothing(tmp_path, monkeypatch, reachable, archive, kind):
    content = archive.read_bytes()
    at = content.index(b"a" * 1000)
    served = {
        "truncated": content[:-40],
        "corrupt": content[:at] + b"x" + content[at + 1 :],
        "page": b"<html>please log in</html>",
        "member": content,
    }[kind]
    serve(monkeypatch, served)
    with pytest.raises(data.DatasetMissingError, match="nothing was kept, try again"):
        fetch("https://there/x.zip", tmp_path / "root" / "target", member="absent" if kind == "member" else "")
    assert list((tmp_path / "root").iterdir()) == []


def test_an_abandoned_download_is_not_trusted(tmp_path, write_planetoid):
    ring = np.arange(600), (np.arange(600) + 1) % 600
    write_planetoid(tmp_path / ".download-abc" / "unpacked", *ring, 600, name="pubmed")
    with pytest.raises(data.DatasetMissingError):
        data.load("pubmed", root=tmp_path, source="official")


def test_members_stay_below_the_target(tmp_path, monkeypatch, reachable):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as opened:
        opened.writestr("../../escaped.txt", "x")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as opened:
        opened.addfile(tarfile.TarInfo("../../escaped.txt"))
    for ending in ("zip", "tar.gz"):
        serve(monkeypatch, (tmp_path / f"evil.{ending}").read_bytes())
        with pytest.raises(data.DatasetMissingError, match="nothing was kept"):
            fetch(f"https://there/x.{ending}", tmp_path / "root" / "target")
    assert not list(tmp_path.rglob("escaped.txt"))
    assert list((tmp_path / "root").iterdir()) == []


def test_links_in_a_tar_cannot_lead_out(tmp_path, monkeypatch, reachable):
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "evil.tar", "w") as opened:
        opened.addfile(link)
    serve(monkeypatch, (tmp_path / "evil.tar").read_bytes())
    with pytest.raises(data.DatasetMissingError, match="nothing was kept"):
        fetch("https://there/x.tar", tmp_path / "root" / "target")


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_a_member_of_a_tar_is_put_in_place(tmp_path, monkeypatch, reachable, ending):
    (tmp_path / "edges.csv").write_text("0,1\n")
    with tarfile.open(tmp_path / "served", "w:gz" if ending == "tar.gz" else "w") as opened:
        opened.add(tmp_path / "edges.csv", "clean/edges.csv")
    serve(monkeypatch, (tmp_path / "served").read_bytes())
    fetch(f"https://there/x.{ending}?dl=1", tmp_path / "root" / "mine.csv", member="clean/edges.csv")
    assert (tmp_path / "root" / "mine.csv").read_text() == "0,1\n"


def test_a_plain_file_is_kept_as_it_is_and_its_hash_checked(tmp_path, monkeypatch, reachable):
    content = gzip.compress(b"0 1\n")
    serve(monkeypatch, content)
    target = tmp_path / "root" / "edges.txt.gz"
    with pytest.raises(data.DatasetMissingError, match=r"MD5 hash of downloaded file .* expected md5:00 but got"):
        fetch("https://there/edges.txt.gz", target, known_hash="md5:00")
    assert list((tmp_path / "root").iterdir()) == []
    fetch("https://there/edges.txt.gz", target, known_hash=f"md5:{hashlib.md5(content).hexdigest()}")
    assert target.read_bytes() == content


@pytest.mark.parametrize("name", ["adj_full.npz", "feats.npy", "edges.txt.gz"])
def test_a_page_in_place_of_a_file_is_not_kept(tmp_path, monkeypatch, reachable, name):
    serve(monkeypatch, b"<!DOCTYPE html><html>Quota exceeded</html>")
    with pytest.raises(data.DatasetMissingError, match=r"not a \.\w+ file: it starts with b'<!DOCTYPE"):
        fetch(f"https://there/download?id={name}", tmp_path / "root" / name)
    assert list((tmp_path / "root").iterdir()) == []


def test_an_empty_answer_is_no_file(tmp_path, monkeypatch, reachable):
    serve(monkeypatch, b"")
    with pytest.raises(data.DatasetMissingError, match="0 bytes arrived"):
        fetch("https://there/feats.npy", tmp_path / "feats.npy")
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_no_surrogate_for_a_slow_publisher(tmp_path, monkeypatch, caplog):
    def too_late(*_, **__):
        raise requests.ReadTimeout

    monkeypatch.setattr(data.download, "why_unreachable", why_unreachable)
    monkeypatch.setattr(requests, "head", too_late)
    for name in ("pubmed", "zinc"):
        with pytest.raises(data.DownloadError, match=r"no answer within 10 s\); source='synthetic' gives a surrogate"):
            data.load(name, root=tmp_path)
    assert not caplog.records


@pytest.mark.parametrize(("status", "instead"), [(503, None), (429, None), (404, "synthetic")])
def test_auto_and_an_error_of_the_publisher(tmp_path, monkeypatch, status, instead):
    def answer(*_, **__):
        response = requests.Response()
        response.status_code = status
        return response

    monkeypatch.setattr(data.download, "why_unreachable", why_unreachable)
    monkeypatch.setattr(requests, "head", answer)
    if instead:
        assert data.load("citeseer", root=tmp_path).meta.source == instead
    else:
        with pytest.raises(data.DownloadError, match=f"cannot be reached .HTTP {status}.; source='synthetic'"):
            data.load("citeseer", root=tmp_path)


def test_auto_takes_no_surrogate_for_a_download_that_breaks_off(tmp_path, monkeypatch, reachable):
    serve(monkeypatch, b"PK half of a file")
    with pytest.raises(data.DownloadError, match=r"pubmed: not under .* failed \(.*nothing was kept, try again"):
        data.load("pubmed", root=tmp_path)


def test_another_process_that_was_quicker(tmp_path, monkeypatch, reachable):
    (tmp_path / "edges.csv").write_text("0,1\n")
    with zipfile.ZipFile(tmp_path / "served", "w") as opened:
        opened.write(tmp_path / "edges.csv", "set/edges.csv")
    target = tmp_path / "root" / "set"

    def quicker(*arguments, **options):
        target.mkdir()
        (target / "edges.csv").write_text("0,1\n2,3\n")
        return shutil_unpack(*arguments, **options)

    shutil_unpack = data.download.shutil.unpack_archive
    serve(monkeypatch, (tmp_path / "served").read_bytes())
    monkeypatch.setattr(data.download.shutil, "unpack_archive", quicker)
    fetch("https://there/x.zip", target, member="set")
    assert (target / "edges.csv").read_text() == "0,1\n2,3\n"
    assert [path.name for path in target.parent.iterdir()] == ["set"]


def test_a_host_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(data.download, "PROBE_TIMEOUT_S", 0.2)
    given_up = threading.Event()

    def hang(*_, **__):
        given_up.wait(10)
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "head", hang)
    start = time.perf_counter()
    assert why_unreachable("https://there/x.zip") == "no answer within 0.2 s"
    assert time.perf_counter() - start < 2
    given_up.set()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A web server of this machine: its URL and its folder."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_HEAD(self):
            if "shy" in self.path:
                self.send_error(405)
            else:
                super().do_HEAD()

        def do_GET(self):
            if "short" not in self.path:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"\x1f\x8b and no more")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(data.download, "why_unreachable", why_unreachable)
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()
    server.server_close()
    thread.join()


def test_missing_page_and_closed_port(site):
    assert why_unreachable(site[0]) is None
    assert why_unreachable(site[0] + "no.zip") == "HTTP 404"
    assert why_unreachable("http://127.0.0.1:1/") == "ConnectionError"


def test_a_server_that_refuses_head_is_asked_for_the_file(site, tmp_path):
    (site[1] / "shy.txt").write_text("0 1\n")
    assert why_unreachable(site[0] + "shy.txt") is None
    fetch(site[0] + "shy.txt", tmp_path / "root" / "edges.txt")
    assert (tmp_path / "root" / "edges.txt").read_text() == "0 1\n"
    with pytest.raises(data.DatasetMissingError, match=r"shier\.txt\?shy: the download .* failed .*404"):
        fetch(site[0] + "shier.txt?shy", tmp_path / "root" / "edges.txt.gz")


def test_a_connection_that_breaks_off_leaves_nothing(site, tmp_path):
    with pytest.raises(
        data.DatasetMissingError, match=r"short\.gz\?shy: .* failed .*986 more expected.*nothing was kept"
    ):
        fetch(site[0] + "short.gz?shy", tmp_path / "root" / "edges.txt.gz")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("source", ["auto", "official"])
def test_pubmed_downloaded_as_dgl_publishes_it(tmp_path, monkeypatch, site, write_planetoid, source):
    url, folder = site
    ring = np.arange(600), (np.arange(600) + 1) % 600
    write_planetoid(tmp_path / "pubmed", *ring, 600, name="pubmed")
    (folder / "dataset").mkdir()
    with zipfile.ZipFile(folder / "dataset" / "pubmed.zip", "w") as opened:
        for file in (tmp_path / "pubmed").iterdir():
            opened.write(file, file.name)
    monkeypatch.setenv("DGL_REPO", url)
    root = tmp_path / "datasets"
    loaded = data.load("pubmed", root=root, source=source)
    assert (loaded.meta.source, loaded.meta.num_edges) == ("official", 1200)
    assert loaded.meta.origin == url + "dataset/pubmed.zip"
    assert len(list(root.iterdir())) == 1


def packed(ending, files):
    """A .zip or .tar.gz of files by their paths."""
    stream = io.BytesIO()
    if ending == ".zip":
        with zipfile.ZipFile(stream, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    else:
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return stream.getvalue()


EDGE_LISTS = {
    # GEMSEC's archive holds eight graphs, MUSAE's features and labels beside its edges; only the edges are kept.
    "artist": (
        ".tar.gz",
        {
            "facebook_clean_data/artist_edges.csv": "node_1,node_2\n0,2\n0,1\n",
            "facebook_clean_data/tvshow_edges.csv": "node_1,node_2\n5,6\n",
        },
        [(0, 1), (0, 2)],
    ),
    "musae-github": (
        ".zip",
        {
            "git_web_ml/musae_git_edges.csv": "id_1,id_2\n0,2\n0,1\n",
            "git_web_ml/musae_git_features.json": '{"0": [1574, 3773], "1": [], "2": [9]}',
            "git_web_ml/musae_git_target.csv": "id,name,ml_target\n0,Eiryyy,0\n1,a,1\n2,b,0\n",
        },
        [(0, 1), (0, 2), (1, 0), (2, 0)],
    ),
    "facebook-large": (
        ".zip",
        {
            "facebook_large/README.txt": "Facebook pages",
            "facebook_large/musae_facebook_edges.csv": "id_1,id_2\n0,2\n1,1\n0,1\n",
            "facebook_large/musae_facebook_features.json": '{"0": [3133, 1275], "1": [], "2": [9]}',
            "facebook_large/musae_facebook_target.csv": "id,facebook_id,page_name,page_type\n0,14,a,tvshow\n",
        },
        [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)],
    ),
    "blog": (
        ".zip",
        {
            "readme.html": "<html></html>",
            "soc-BlogCatalog.mtx": "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 1\n",
        },
        [(0, 1), (0, 2), (1, 0), (2, 0)],
    ),
}


@pytest.mark.parametrize("name", EDGE_LISTS)
def test_edge_lists_in_their_publishers_archives(tmp_path, monkeypatch, reachable, name):
    ending, files, edges = EDGE_LISTS[name]
    (remote,) = data.info(name).official.files(tmp_path)
    assert remote.url.endswith(ending)
    serve(monkeypatch, packed(ending, files))
    loaded = data.load(name, root=tmp_path, source="official")
    keys, queries = loaded.graph.edges()
    assert list(zip(queries.tolist(), keys.tolist(), strict=True)) == edges
    assert (loaded.meta.num_nodes, loaded.meta.features, loaded.meta.origin) == (3, "random", remote.url)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [remote.target]  # and nothing else was kept
    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", None)  # the second time nothing is downloaded
    assert data.load(name, root=tmp_path, source="official").meta == loaded.meta


def test_an_archive_without_the_edge_list_leaves_nothing(tmp_path, monkeypatch, reachable):
    serve(monkeypatch, packed(".tar.gz", {"facebook_clean_data/tvshow_edges.csv": "node_1,node_2\n5,6\n"}))
    with pytest.raises(data.DatasetMissingError, match=r"gemsec_facebook_dataset\.tar\.gz: .*nothing was kept"):
        data.load("artist", root=tmp_path, source="official")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
