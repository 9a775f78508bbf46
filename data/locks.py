"""One process at a time, between processes of one machine or of a shared file system."""

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_S = 0.2
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # file systems that have none


@contextlib.contextmanager
def only_one_process(lock: Path, doing: str, limit_s: float) -> Iterator[None]:
    """Wait until no other process is inside such a block with the same `lock`, a file that exists only meanwhile.

    The system frees the lock of a process that ends, in whatever way. On a file system without locks nothing is waited
    for.

    Args:
        lock: in an existing folder.
        doing: what the block does, for the log: "downloading X".
        limit_s: how long to wait.

    Raises:
        TimeoutError: another process is still inside.
        OSError: the lock cannot be created.
    """
    waiting_since: float | None = None
    while (descriptor := _locked(lock)) is None:
        if waiting_since is None:
            waiting_since = time.monotonic()
            logger.info("another process is %s; waiting for it, at most %.0f minutes", doing, limit_s / 60)
        elif time.monotonic() - waiting_since > limit_s:
            minutes = f"{limit_s / 60:.0f} minutes"
            raise TimeoutError(f"another process is {doing} since {minutes} or more; wait for it, or end it")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # while it is locked: whoever waits for this file finds it gone, and makes another
        os.close(descriptor)


def _locked(lock: Path) -> int | None:
    """A descriptor of the locked file; None if another process has it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(lock).st_ino:
            return descriptor
    except BlockingIOError:
        pass
    except FileNotFoundError:  # it was released and removed between the two steps
        pass
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return descriptor
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
