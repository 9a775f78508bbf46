"""Atomic downloads: a target is complete and in place, or absent."""

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from data.atomic import made_once
from data.errors import DatasetMissingError, DownloadError

logger = logging.getLogger(__name__)

TIMEOUT_S = (10.0, 60.0)  # to connect, and between two packets
BUSY = (408, 429, 500, 502, 503, 504)  # statuses of servers that may answer later
# Arguments of shutil.unpack_archive. Zip members that lead out of the folder are skipped; the filter makes such tar
# members an error.
_TAR = {"format": "tar", "filter": "data"}
ARCHIVES = {".zip": {"format": "zip"}, ".tar": _TAR, ".tar.gz": _TAR, ".tgz": _TAR}


def fetch(url: str, target: Path, member: str = "", known_hash: str = "") -> None:
    """Download a file, or a .zip, .tar or .tar.gz archive, to `target`, unless it exists. If another process downloads
    the same target, this one waits for it. An interrupted download starts from the beginning.

    Args:
        url: an archive is recognised by the suffix of the URL's path.
        target: file or folder to create.
        member: file or folder of the archive that becomes `target`; "" for all of it.
        known_hash: "md5:..." or "sha256:...", if known.

    Raises:
        DownloadError: a timeout, an error of the server, an interrupted download, or content with another hash.
        DatasetMissingError: no network, or the publisher has no such file.
        OSError: the target cannot be written.
    """
    with made_once(target) as unfinished:
        if unfinished is None:
            return
        with tempfile.TemporaryDirectory(dir=unfinished.parent) as scratch:
            arrived = download(url, Path(scratch, "arrived"), known_hash)
            path = urlsplit(url).path
            if options := next((options for suffix, options in ARCHIVES.items() if path.endswith(suffix)), None):
                shutil.unpack_archive(arrived, Path(scratch, "unpacked"), **options)
                arrived = Path(scratch, "unpacked", member)
                if not arrived.exists():
                    raise DownloadError(f"{url}: the archive holds no {member}: another version")
            os.replace(arrived, unfinished)


def download(url: str, target: Path, known_hash: str = "") -> Path:
    """Download one file to `target`; errors as `fetch`."""
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    logger.info("downloading %s", url)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=2**20, timeout=TIMEOUT_S)
    try:
        pooch.retrieve(url, known_hash or None, target.name, target.parent, downloader=downloader)
        with target.open("rb") as file:
            if file.read(64).lstrip().startswith(b"<"):
                raise ValueError("a web page arrived in place of the file")
    except requests.HTTPError as error:
        status = error.response.status_code
        kind = DownloadError if status in BUSY else DatasetMissingError
        raise kind(f"{url}: cannot be downloaded (HTTP {status})") from error
    except (requests.Timeout, requests.exceptions.ChunkedEncodingError, ValueError) as error:
        raise DownloadError(f"{url}: the download failed ({error}); nothing was kept, try again") from error
    except requests.RequestException as error:
        raise DatasetMissingError(f"{url}: cannot be reached ({type(error).__name__})") from error
    return target
