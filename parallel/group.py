"""The process group of a run: start, agreement and failure of the ranks.

Under torchrun each rank is a process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. GPUs communicate
by NCCL, CPUs by gloo; with gloo several ranks can share one GPU, through host memory.

A rank that fails writes its reason to the store of the group and leaves; torchrun then ends the other ranks of its
machine within a second. Ranks that still run meet a closed connection (gloo) and raise a RankError with the name of the
failed rank and its reason. Of a rank that was killed, the ranks of its machine notice the end of its process, and write
it to the store for those of other machines. Over NCCL, which does not notice a rank that ended, a thread ends the
process of a rank that is still in the group after GRACE seconds, unless torchrun does.

The store and the messages between ranks are torch's: without encryption and authentication, and what `share` and
`all_values` receive is unpickled. The port of MASTER_ADDR must not be reachable from a network that is not trusted.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from common.launch import RankError
from fused3s.torch_side.torch_private import default_store

COLLECTIVE_TIMEOUT = 600.0  # seconds that a rank waits for the others: they may compile
MEETING_TIMEOUT = 120.0  # the same, at the start
REASON_TIMEOUT = 3.0  # seconds to wait for the reason of a rank that closed its connection
STORE_TIMEOUT = 20.0  # seconds that rank 0, which may hold the store, stays for ranks that have not met the failure yet
GRACE = 10.0  # seconds to leave the group after another rank failed
WATCHED = ("nccl",)  # backends with such a thread
POLL_SECONDS = 0.1
# Set unless the environment sets them. NCCL's blocks go before those of a kernel that fills the GPU: an exchange would
# otherwise begin when attention over a rank's own columns ends. A capture waits for no other rank, as it would in order
# to register buffers.
NCCL_DEFAULTS = {"TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_GRAPH_REGISTER": "0"}
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ENDED = "ended without a reason (killed? out of memory?)"

Result = TypeVar("Result")


def _machine() -> str:
    """This machine, and the space of its process numbers: containers have their own."""
    return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino if sys.platform == 'linux' else ''}"


@dataclass(frozen=True)
class Peer:
    """The process of a rank. `created` tells it from a later process of the same number."""

    machine: str
    pid: int
    created: float

    def has_ended(self) -> bool:
        """Whether it has ended, as far as this machine knows."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.created or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True, eq=False)
class Group:
    """The process group, from the view of this rank.

    Attributes:
        rank: 0 to size - 1.
        size: number of ranks.
        device: device of this rank's tensors.
        backend: "nccl" or "gloo".
        handle: torch's process group; None for the default one.
        machines: number of machines that the ranks run on.
        graphs: CUDA graphs that hold NCCL's kernels, see `parallel.capture`.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    handle: "dist.ProcessGroup | None" = None
    machines: int = 1
    graphs: Any = field(default_factory=weakref.WeakSet)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports and writes files."""
        return self.rank == 0

    @property
    def link(self) -> str:
        """What connects the ranks, a key of `cost_model.LINKS`."""
        return "nccl between machines" if self.backend == "nccl" and self.machines > 1 else self.backend

    @property
    def through_host(self) -> bool:
        """Whether tensors of a GPU travel through host memory."""
        return self.backend == "gloo" and self.device.type == "cuda"


@contextmanager
def ranks(device: str = "auto", *, timeout: float = COLLECTIVE_TIMEOUT) -> Iterator[Group]:
    """Join the launcher's process group, and leave it at the end of the block.

    Uses NCCL if each rank of this machine has its own GPU, else gloo.

    Args:
        device: "cuda", the GPU of this rank's LOCAL_RANK; "cpu"; "auto": a GPU if there is one.
        timeout: seconds that a collective waits for the other ranks.

    Raises:
        ValueError: another device, or "cuda" without a GPU.
        RankError: a launcher's variable is missing or wrong, the ranks do not meet, or another rank ended.
    """
    rank, size = _place()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"runtime.device = {device!r} on several ranks: allowed are auto, cuda (each its own) and cpu")
    if device == "cuda" and not gpus:
        raise ValueError("runtime.device = 'cuda': no NVIDIA GPU found, or this PyTorch has no CUDA; use cpu")
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    place, backend = torch.device("cpu"), "gloo"
    if device != "cpu" and gpus:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % gpus)
        torch.cuda.set_device(place)
        backend = "nccl" if per_machine <= gpus else "gloo"
    options = {"device_id": place} if backend == "nccl" else {}  # connects now, not in the first collective
    waits = timedelta(seconds=timeout)
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    store = None
    try:
        deadline = time.monotonic() + min(timeout, MEETING_TIMEOUT)
        store = _open_store(rank, min(timeout, MEETING_TIMEOUT))
        store.set_timeout(waits)
        _meet(store, rank, size, deadline)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=waits, **options)
        store = default_store()  # the same with another prefix
        _join(store, rank, size)
    except (RuntimeError, ValueError, TimeoutError) as error:
        if store is not None:
            _leave(store, rank, size)
        if isinstance(error, RankError):
            raise
        raise RankError(
            f"rank {rank} of {size}: the ranks did not meet at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({_first_line(error)}); do all of them run, with the same WORLD_SIZE?"
        ) from error
    group = Group(rank, size, place, backend, machines=-(-size // per_machine))
    left = threading.Event()
    is_watched = backend in WATCHED and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_watched:
        threading.Thread(target=_watch, args=(store, rank, size, left), daemon=True).start()
    try:
        yield group
    except Exception as error:
        left.set()
        explained = _explained(error, store, rank, size)
        if backend == "gloo":  # closes the connections, which the others notice; NCCL would wait for work in flight
            traceback.clear_frames(error.__traceback__)  # an unfinished collective in them keeps the group
            dist.destroy_process_group()
        _leave(store, rank, size)
        raise explained from error
    finally:
        for captured in group.graphs:
            captured.graph.reset()  # NCCL would wait for its end
    if is_watched:
        _leave(store, rank, size)
    dist.destroy_process_group()
    left.set()


def _open_store(rank: int, timeout: float) -> "dist.Store":
    """The store of torchrun, or of rank 0. That of torch's rendezvous waits for all ranks, also for a killed one."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not of_torchrun,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"ranks {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _meet(store: "dist.Store", rank: int, size: int, deadline: float) -> None:
    """Wait until all ranks have joined the store."""
    _join(store, rank, size)
    while missing := sorted(set(range(size)) - _peers(store, size).keys()):
        if failure := _failure(store, rank, size):
            raise RankError(failure)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come in time")
        time.sleep(POLL_SECONDS / 4)


def _join(store: "dist.Store", rank: int, size: int) -> None:
    own = json.dumps([_machine(), os.getpid(), psutil.Process().create_time()])
    for key, value, text in (
        ("size", str(size), "WORLD_SIZE differs between ranks"),
        (f"process/{rank}", own, f"two processes have RANK = {rank}"),
    ):
        if store.compare_set(key, "", value).decode() != value:
            _tell(store, f"failed/{rank}", f"failed: {text}")
            raise ValueError(text)


def _peers(store: "dist.Store", size: int) -> dict[int, Peer]:
    """The processes that have joined the store, by rank."""
    keys = {other: f"process/{other}" for other in range(size)}
    return {other: Peer(*json.loads(store.get(key))) for other, key in keys.items() if store.check([key])}


def on_first_rank(group: Group, work: Callable[[], Result]) -> Result | None:
    """Run `work` on rank 0 and return its result there; the other ranks wait without a time limit and get None.

    Raises:
        RankError: a rank failed.
    """
    key = share(group, f"done/{uuid.uuid4()}")
    store = default_store()
    if group.is_first:
        result = work()
        store.set(key, "")
        return result
    while not _has(store, key, group.rank):
        if failure := _failure(store, group.rank, group.size):
            raise RankError(failure)
        time.sleep(POLL_SECONDS)
    return None


def shared_from_first_rank(group: Group, work: Callable[[], Result]) -> Result:
    """Run `work` as `on_first_rank` does; its picklable result on all ranks."""
    return share(group, on_first_rank(group, work))


def share(group: Group, value: Result) -> Result:
    """Broadcast a picklable `value` from rank 0 to all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group.handle)
    return values[0]


def all_values(group: Group, value: Result) -> list[Result]:
    """Gather a picklable `value` of each rank on all ranks: a list of P values."""
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, value, group=group.handle)
    return found


def check_agreement(group: Group, values: Mapping[str, str]) -> None:
    """Compare values between ranks, such as hashes of configuration and weights.

    Raises:
        RankError: a value differs; the text lists it by rank. All ranks raise it.
    """
    found = all_values(group, dict(values))
    lines = []
    for name in values:
        by_value: dict[str, list[str]] = {}
        for rank, other in enumerate(found):
            by_value.setdefault(other.get(name, "none"), []).append(str(rank))
        if len(by_value) > 1:
            shown = "; ".join(f"rank {', '.join(who)}: {value}" for value, who in by_value.items())
            lines.append(f"{name}: {shown}")
    if lines:
        raise RankError("the ranks must agree, and differ in " + " | ".join(lines))


def _place() -> tuple[int, int]:
    missing = [name for name in REQUIRED if name not in os.environ]
    if missing:
        raise RankError(f"{', '.join(missing)}: not set; start the ranks with torchrun --nproc-per-node N program.py")
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise RankError(f"RANK = {rank} and WORLD_SIZE = {size}: a rank from 0 to WORLD_SIZE - 1 is needed")
    if not (port := os.environ["MASTER_PORT"]).isdecimal() or not 0 < int(port) < 2**16:
        raise RankError(f"MASTER_PORT = {port}: a port from 1 to 65535 is needed")
    return int(rank), int(size)


def _explained(error: Exception, store: "dist.Store", rank: int, size: int) -> Exception:
    """The error to raise on this rank: another rank's reason where a collective broke, else the error itself."""
    if isinstance(error, RankError):  # all ranks raise it, or it names the rank that failed
        return error
    if not _is_broken_collective(error):
        text = f"failed: {type(error).__name__}: {_first_line(error)} (on {socket.gethostname()})"
        _tell(store, f"failed/{rank}", text)
        return error
    _tell(store, f"met/{rank}", "a closed connection")
    deadline = time.monotonic() + REASON_TIMEOUT
    silent: list[int] = []
    try:
        while time.monotonic() < deadline:
            if failure := _failure(store, rank, size):
                return RankError(failure)
            silent = [other for other in range(size) if not _has(store, f"met/{other}", rank)]
            time.sleep(POLL_SECONDS)
    except RankError as no_store:
        return no_store
    who = f"rank {', '.join(map(str, silent))}" if silent else "another rank"
    return RankError(f"rank {rank} stops, since {who} {ENDED} or did not answer in time: {_first_line(error)}")


def _failure(store: "dist.Store", rank: int, size: int) -> str | None:
    """Which other rank failed or was killed, and why; None if none has. A killed one is noted for the other ranks."""
    try:
        for other, peer in _peers(store, size).items():
            # Ranks that meet a failure end, too, after a note.
            if peer.has_ended() and not any(store.check([f"{note}/{other}"]) for note in ("failed", "met", "left")):
                store.set(f"failed/{other}", ENDED)
        for other in range(size):
            if other != rank and store.check([f"failed/{other}"]):
                return f"rank {rank} stops, since rank {other} {store.get(f'failed/{other}').decode()}"
    except RuntimeError:
        raise _without_store(rank) from None
    return None


def _has(store: "dist.Store", key: str, rank: int) -> bool:
    try:
        return store.check([key])
    except RuntimeError:
        raise _without_store(rank) from None


def _without_store(rank: int) -> RankError:
    """torchrun holds the store; without torchrun rank 0 does."""
    return RankError(f"rank {rank} stops, since rank 0 {ENDED}")


def _watch(store: "dist.Store", rank: int, size: int, left: threading.Event) -> None:
    """End this process if it does not leave the group after another rank failed. Returns when rank 0 has left."""
    while not left.wait(1.0):
        try:
            is_over = _has(store, "left/0", rank)  # read before the failure, which is written before it
            failure = _failure(store, rank, size)
        except RankError as no_store:
            is_over, failure = False, str(no_store)
        if failure and not left.wait(GRACE):
            _tell(store, f"left/{rank}", "")
            print(f"error: {failure}", file=sys.stderr, flush=True)
            os._exit(1)
        if is_over:
            return


def _leave(store: "dist.Store", rank: int, size: int) -> None:
    """Rank 0 may hold the store: the other ranks read the reason before it ends."""
    _tell(store, f"left/{rank}", "")
    deadline = time.monotonic() + STORE_TIMEOUT
    with suppress(RuntimeError):  # torchrun, which holds the store, has ended
        while rank == 0 and time.monotonic() < deadline:
            others = (other for other, peer in _peers(store, size).items() if other and not peer.has_ended())
            if all(store.check([f"left/{other}"]) for other in others):
                return
            time.sleep(POLL_SECONDS / 2)


def _is_broken_collective(error: Exception) -> bool:
    if isinstance(error, (RankError, torch.OutOfMemoryError)):
        return False
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "Connection" in text or "NCCL" in text)


def _tell(store: "dist.Store", key: str, text: str) -> None:
    try:
        store.set(key, text)
    except RuntimeError:  # the store is gone with rank 0
        return


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
