"""Downloads that are complete and in place, or absent."""

import errno
import logging
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from data.errors import DatasetMissingError, DownloadError
from data.locks import only_one_process

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
WAIT_S = 3600.0  # for another process's download of the same file
NO_ANSWER = "no answer within"
BROKEN = "the connection broke off"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
BUSY = (408, 429, 500, 502, 503, 504)  # statuses of servers that may answer later
NO_HEAD = (403, 405, 501)  # statuses of servers that refuse HEAD but answer GET
MAGIC = {".npz": b"PK", ".npy": b"\x93NUMPY", ".gz": b"\x1f\x8b", ".mat": b"MATLAB"}
# Arguments of shutil.unpack_archive. Zip members that lead out of the folder are skipped; the filter makes such tar
# members an error, which pooch's Untar does only from Python 3.12 on.
_TAR = {"format": "tar", "filter": "data"}
ARCHIVES = {".zip": {"format": "zip"}, ".tar": _TAR, ".tar.gz": _TAR, ".tgz": _TAR}


class Fetch(Protocol):
    """Makes the file or archive at `url`, or the `member` of an archive, available as `target`."""

    def __call__(self, url: str, target: Path, member: str = "", known_hash: str = "") -> None: ...


def fetch_nothing(url: str, target: Path, member: str = "", known_hash: str = "") -> None:
    """The `Fetch` for local files only.

    Raises:
        DatasetMissingError: always, since a fetch means that a file is missing.
    """
    raise DatasetMissingError(f"{target}: no such file or folder (published at {url})")


def fetch(url: str, target: Path, member: str = "", known_hash: str = "") -> None:
    """Download a file, or a .zip, .tar or .tar.gz archive, to `target`.

    All work happens in a temporary folder beside `target`, and a rename is the last step: an interrupted download
    leaves at most a `.download-*` folder, which nothing reads, and the next download starts from the beginning. If
    another process downloads the same target, this one waits for it.

    Args:
        url: an archive is recognised by the suffix of the URL's path.
        target: file or folder to create.
        member: file or folder of the archive that becomes `target`; "" for all of it.
        known_hash: "md5:..." or "sha256:...", if the publisher states one.

    Raises:
        DownloadError: the publisher is busy or slow, the download broke off, the content is not the published one, the
            disk is full or read-only, or another process takes longer than WAIT_S. Nothing is kept.
        DatasetMissingError: no network, or the publisher has no such file.
    """
    if problem := why_unreachable(url):
        later = problem.startswith((NO_ANSWER, BROKEN)) or problem in [f"HTTP {status}" for status in BUSY]
        raise (DownloadError if later else DatasetMissingError)(f"{url}: cannot be reached ({problem})")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with only_one_process(target.with_name(f".{target.name}.lock"), f"downloading {target}", WAIT_S):
            if target.exists():
                logger.info("%s: downloaded by another process", target)
            else:
                _download(url, target, member, known_hash)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        remedy = "try again"
        if not target.parent.is_dir() or (isinstance(error, OSError) and error.errno in (*FULL, *UNWRITABLE)):
            remedy = "make room and set permissions, or choose another folder (root; data.root in a configuration)"
        raise DownloadError(
            f"{url}: the download to {target} failed ({type(error).__name__}: {error}); nothing was kept, {remedy}"
        ) from error


def _download(url: str, target: Path, member: str, known_hash: str) -> None:
    import pooch  # slow to import

    pooch.get_logger().setLevel(logging.WARNING)
    logger.info("downloading %s to %s", url, target)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=2**20, timeout=READ_TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as scratch:
        file = Path(pooch.retrieve(url, known_hash or None, "arrived", scratch, downloader=downloader))
        _check_content(file, target)
        path = urlsplit(url).path
        if unpacking := next((options for suffix, options in ARCHIVES.items() if path.endswith(suffix)), None):
            folder = Path(scratch, "unpacked")
            shutil.unpack_archive(file, folder, **unpacking)
            file = folder / member
        try:
            os.replace(file, target)
        except OSError:
            # On a file system without locks another process may be quicker: a folder is complete where it exists.
            if not target.is_dir():
                raise


def _check_content(file: Path, target: Path) -> None:
    """Raise a ValueError for an empty file, or a web page ("quota exceeded", "log in") sent in place of the file."""
    with file.open("rb") as opened:
        start = opened.read(64)
    if not start:
        raise ValueError("0 bytes arrived")
    magic = MAGIC.get(target.suffix, b"")
    if not start.startswith(magic):
        raise ValueError(f"not a {target.suffix} file: it starts with {start[:20]!r}")


def why_unreachable(url: str) -> str | None:
    """The reason why `url` does not answer within PROBE_TIMEOUT_S; None if it does."""
    import requests
    from urllib3.exceptions import ProtocolError

    reasons = [f"{NO_ANSWER} {PROBE_TIMEOUT_S:g} s"]

    def probe() -> None:
        try:
            response = requests.head(url, timeout=PROBE_TIMEOUT_S, allow_redirects=True)
            if response.status_code not in NO_HEAD:
                response.raise_for_status()
            reasons.clear()
        except requests.Timeout:
            pass
        except requests.ConnectionError as error:
            broken = error.args and isinstance(error.args[0], ProtocolError)  # of a server that took the connection
            reasons[:] = [BROKEN if broken else type(error).__name__]
        except requests.RequestException as error:
            reasons[:] = [type(error).__name__ if error.response is None else f"HTTP {error.response.status_code}"]

    # A thread, because the time-out of requests does not cover the look-up of the host's name.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return reasons[0] if reasons else None
