"""Downloads that are either whole and in place, or not there at all."""

import logging
import os
import sys
import tempfile
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Protocol

from data.errors import DatasetMissingError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0


class Fetch(Protocol):
    """Puts the folder `member` (default: all) of the zip archive at `url` in place as the folder `target`."""

    def __call__(self, url: str, target: Path, member: str = "") -> None: ...


def fetch_nothing(url: str, target: Path, member: str = "") -> None:
    """The `Fetch` of a caller who wants local files only.

    Raises:
        DatasetMissingError: always, as a fetch is asked for where files are missing.
    """
    raise DatasetMissingError(f"{target}: not there (it is published at {url})")


def fetch_archive(url: str, target: Path, member: str = "") -> None:
    """Download a zip archive and put its folder `member` in place as `target`.

    All work happens in a temporary folder beside `target`, and a rename is the last step: an interrupted download
    leaves at most a `.download-*` folder, which nothing reads.

    Raises:
        DatasetMissingError: no network, or what arrived is not the archive. Nothing is kept.
    """
    problem = why_unreachable(url)
    if problem:
        raise DatasetMissingError(f"{url}: cannot be reached ({problem})")
    from pooch import HTTPDownloader  # slow to import, and only wanted for downloads

    logger.info("downloading %s to %s", url, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as scratch:
        archive, unpacked = Path(scratch, "archive.zip"), Path(scratch, "unpacked")
        download = HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=2**20, timeout=READ_TIMEOUT_S)
        try:
            download(url, str(archive), None)
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(unpacked)  # checks every member's CRC, and keeps members below `unpacked`
            os.replace(unpacked / member, target)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DatasetMissingError(
                f"{url}: the download to {target} failed ({type(error).__name__}: {error}); nothing was kept, try again"
            ) from error


def why_unreachable(url: str) -> str | None:
    """The reason why `url` does not answer within 5 seconds; None if it does."""
    import requests

    reasons = [f"no answer within {PROBE_TIMEOUT_S:g} s"]

    def probe() -> None:
        try:
            requests.head(url, timeout=PROBE_TIMEOUT_S, allow_redirects=True).raise_for_status()
            reasons.clear()
        except requests.RequestException as error:
            reasons[:] = [type(error).__name__ if error.response is None else f"HTTP {error.response.status_code}"]

    # A thread, because the time-out of requests does not cover looking up the host's name.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return reasons[0] if reasons else None
