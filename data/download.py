"""Downloads that are either whole and in place, or not there at all."""

import logging
import os
import sys
import tarfile
import tempfile
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from data.errors import DatasetMissingError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
NO_HEAD = (403, 405, 501)  # answers of servers that give a file and refuse to describe it
MAGIC = {".npz": b"PK", ".npy": b"\x93NUMPY", ".gz": b"\x1f\x8b"}


class Fetch(Protocol):
    """Puts what is published at `url` in place as `target`; of an archive its `member` (default: all of it)."""

    def __call__(self, url: str, target: Path, member: str = "", known_hash: str = "") -> None: ...


def fetch_nothing(url: str, target: Path, member: str = "", known_hash: str = "") -> None:
    """The `Fetch` of a caller who wants local files only.

    Raises:
        DatasetMissingError: always, as a fetch is asked for where files are missing.
    """
    raise DatasetMissingError(f"{target}: not there (it is published at {url})")


def fetch(url: str, target: Path, member: str = "", known_hash: str = "") -> None:
    """Download a file, or a .zip, .tar or .tar.gz archive, and put it in place as `target`.

    All work happens in a temporary folder beside `target`, and a rename is the last step: an interrupted download
    leaves at most a `.download-*` folder, which nothing reads, and the next one starts afresh.

    Args:
        url: where it is published; an archive is known by the ending of the URL's path.
        target: file or folder to make.
        member: file or folder inside the archive that becomes `target`; "" is all of it.
        known_hash: "md5:..." or "sha256:..." where the publisher states one.

    Raises:
        DatasetMissingError: no network, or what arrived is not what was published. Nothing is kept.
    """
    problem = why_unreachable(url)
    if problem:
        raise DatasetMissingError(f"{url}: cannot be reached ({problem})")
    from pooch import HTTPDownloader  # slow to import, and only wanted for downloads

    logger.info("downloading %s to %s", url, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as scratch:
        arrived, unpacked = Path(scratch, "arrived"), Path(scratch, "unpacked")
        download = HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=2**20, timeout=READ_TIMEOUT_S)
        try:
            download(url, str(arrived), None)
            _check_content(arrived, target)
            _check_hash(arrived, known_hash)
            os.replace(unpacked / member if _unpack(url, arrived, unpacked) else arrived, target)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
            raise DatasetMissingError(
                f"{url}: the download to {target} failed ({type(error).__name__}: {error}); nothing was kept, try again"
            ) from error


def _check_content(file: Path, target: Path) -> None:
    """Hosts answer with a page ("quota exceeded", "log in") and no error where a file should be."""
    with file.open("rb") as opened:
        start = opened.read(64)
    if not start:
        raise ValueError("0 bytes arrived")
    magic = MAGIC.get(target.suffix, b"")
    if not start.startswith(magic):
        raise ValueError(f"what arrived is no {target.suffix} file: it starts with {start[:20]!r}")


def _check_hash(file: Path, known_hash: str) -> None:
    if not known_hash:
        return
    from pooch import file_hash

    algorithm, _, expected = known_hash.partition(":")
    got = file_hash(str(file), alg=algorithm)
    if got != expected:
        raise ValueError(f"the {algorithm} of what arrived is {got}, the publisher states {expected}")


def _unpack(url: str, archive: Path, folder: Path) -> bool:
    """Unpack into `folder`; False if the URL's ending is not an archive's. A member that would leave it is an error."""
    path = urlsplit(url).path
    if path.endswith(".zip"):
        with zipfile.ZipFile(archive) as opened:
            _check_members(opened.namelist(), folder)
            opened.extractall(folder)  # checks every member's CRC
        return True
    if path.endswith((".tar", ".tar.gz", ".tgz")):
        with tarfile.open(archive) as opened:
            _check_members(opened.getnames(), folder)
            opened.extractall(folder, filter="data")  # also refuses links that lead out, and devices
        return True
    return False


def _check_members(names: list[str], folder: Path) -> None:
    for name in names:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"the archive's member {name!r} would be written outside the target")


def why_unreachable(url: str) -> str | None:
    """The reason why `url` does not answer within 5 seconds; None if it does."""
    import requests

    reasons = [f"no answer within {PROBE_TIMEOUT_S:g} s"]

    def probe() -> None:
        try:
            response = requests.head(url, timeout=PROBE_TIMEOUT_S, allow_redirects=True)
            if response.status_code not in NO_HEAD:
                response.raise_for_status()
            reasons.clear()
        except requests.RequestException as error:
            reasons[:] = [type(error).__name__ if error.response is None else f"HTTP {error.response.status_code}"]

    # A thread, because the time-out of requests does not cover looking up the host's name.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return reasons[0] if reasons else None
