"""The process group of a run: start, agreement and failure of the ranks.

Under torchrun each rank is a process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. GPUs communicate
by NCCL, CPUs by gloo; with gloo several ranks can share one GPU, through host memory.

A rank that fails writes its reason to the store of the group and leaves; the others meet a closed connection (gloo)
and raise a RankError with its name and reason, or torchrun ends them within a second. Of a rank that was killed, the
ranks of its machine notice the end of its process, and write it to the store for those of other machines. NCCL does not
notice a rank that ended: unless torchrun ends the others, a thread of each does after GRACE seconds.

The store and the messages between ranks are torch's: without encryption and authentication, and what `share`,
`all_values` and `scatter` receive is unpickled. The port of MASTER_ADDR must not be reachable from a network that is
not trusted.
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
        """What connects the ranks, as rows of results name it."""
        return {"gloo": "gloo", "nccl": "NVLink" if self.machines == 1 else "InfiniBand"}[self.backend]

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
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    notes = None
    try:
        deadline = time.monotonic() + min(timeout, MEETING_TIMEOUT)
        notes = _Notes(_open_store(rank, min(timeout, MEETING_TIMEOUT)), rank, size)
        waits = timedelta(seconds=timeout)
        notes.store.set_timeout(waits)
        notes.meet(deadline)
        dist.init_process_group(backend, store=notes.store, rank=rank, world_size=size, timeout=waits, **options)
        notes = _Notes(default_store(), rank, size)  # the same with another prefix
        notes.join()
    except (RuntimeError, ValueError, TimeoutError) as error:
        if notes is not None:
            notes.leave()
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
        threading.Thread(target=_watch, args=(notes, left), daemon=True).start()
    try:
        yield group
    except Exception as error:
        left.set()
        explained = notes.explained(error)
        if backend == "gloo":  # closes the connections, which the others notice; NCCL would wait for work in flight
            traceback.clear_frames(error.__traceback__)  # an unfinished collective in them keeps the group
            dist.destroy_process_group()
        notes.leave()
        raise explained from error
    finally:
        for captured in group.graphs:
            captured.graph.reset()  # NCCL would wait for its end
    if is_watched:
        notes.leave()
    dist.destroy_process_group()
    left.set()


def on_first_rank(group: Group, work: Callable[[], Result]) -> Result | None:
    """Run `work` on rank 0 and return its result there; the other ranks wait without a time limit and get None, or a
    RankError if a rank failed."""
    key = share(group, f"done/{uuid.uuid4()}")
    notes = _Notes(default_store(), group.rank, group.size)
    if group.is_first:
        result = work()
        notes.store.set(key, "")
        return result
    while not notes.has(key):
        notes.check()
        time.sleep(POLL_SECONDS)
    return None


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
    found, lines = all_values(group, dict(values)), []
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


def _open_store(rank: int, timeout: float) -> "dist.Store":
    """The store of torchrun, or of rank 0. That of torch's rendezvous waits for all ranks, also for a killed one."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False, "multi_tenant": True}
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=rank == 0 and not of_torchrun, **options)
    return dist.PrefixStore(f"ranks {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


@dataclass(frozen=True)
class _Notes:
    """What the ranks tell each other through the store, by keys with the number of a rank.

    process     the machine, the number and the start of its process
    failed      why it failed
    met, left   it met a closed connection; it left the group
    """

    store: "dist.Store"
    rank: int
    size: int

    def join(self) -> None:
        own = f"process/{self.rank}", json.dumps(_own_process()), f"two processes have RANK = {self.rank}"
        for key, value, text in (("size", str(self.size), "WORLD_SIZE differs between ranks"), own):
            if self.store.compare_set(key, "", value).decode() != value:
                self.tell("failed", f"failed: {text}")
                raise ValueError(text)

    def meet(self, deadline: float) -> None:
        """Wait until all ranks have joined."""
        self.join()
        while missing := sorted(set(range(self.size)) - self.processes().keys()):
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come in time")
            time.sleep(POLL_SECONDS / 4)

    def processes(self) -> dict[int, tuple[str, int, float]]:
        """The processes that have joined, by rank."""
        keys = {other: f"process/{other}" for other in range(self.size)}
        return {other: json.loads(self.store.get(key)) for other, key in keys.items() if self.store.check([key])}

    def tell(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # the store is gone with rank 0
            self.store.set(f"{key}/{self.rank}", text)

    def has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:  # torchrun holds the store; without torchrun rank 0 does
            raise RankError(f"rank {self.rank} stops, since rank 0 {ENDED}") from None

    def failure(self) -> str | None:
        """Which other rank failed or was killed, and why; None if none has. A killed one is noted for the others."""
        start = f"rank {self.rank} stops, since rank"
        try:
            for other, process in self.processes().items():
                # Ranks that meet a failure end, too, after a note.
                told = (self.store.check([f"{key}/{other}"]) for key in ("failed", "met", "left"))
                if _has_ended(*process) and not any(told):
                    self.store.set(f"failed/{other}", ENDED)
            for other in range(self.size):
                if other != self.rank and self.store.check([f"failed/{other}"]):
                    return f"{start} {other} {self.store.get(f'failed/{other}').decode()}"
        except RuntimeError:  # torchrun holds the store; without torchrun rank 0 does
            return f"{start} 0 {ENDED}"
        return None

    def check(self) -> None:
        """Raise a RankError if another rank failed."""
        if failure := self.failure():
            raise RankError(failure)

    def explained(self, error: Exception) -> Exception:
        """The error to raise on this rank: another rank's reason where a collective broke, else the error itself."""
        if isinstance(error, RankError):  # all ranks raise it, or it names the rank that failed
            return error
        if not _is_broken_collective(error):
            self.tell("failed", f"failed: {type(error).__name__}: {_first_line(error)} (on {socket.gethostname()})")
            return error
        self.tell("met", "")
        deadline = time.monotonic() + REASON_TIMEOUT
        while time.monotonic() < deadline:
            if failure := self.failure():
                return RankError(failure)
            time.sleep(POLL_SECONDS)
        return RankError(f"rank {self.rank} stops, since another rank {ENDED} or did not answer: {_first_line(error)}")

    def leave(self) -> None:
        """Rank 0 may hold the store: the other ranks read the reason before it ends."""
        self.tell("left", "")
        deadline = time.monotonic() + STORE_TIMEOUT
        with suppress(RuntimeError):  # torchrun, which holds the store, has ended
            while self.rank == 0 and time.monotonic() < deadline:
                others = [other for other, process in self.processes().items() if other and not _has_ended(*process)]
                if all(self.store.check([f"left/{other}"]) for other in others):
                    return
                time.sleep(POLL_SECONDS / 2)


def _watch(notes: _Notes, left: threading.Event) -> None:
    """End this process if it does not leave the group after another rank failed. Returns when rank 0 has left."""
    while not left.wait(1.0):
        try:
            is_over = notes.has("left/0")  # read before the failure, which is written before it
            failure = notes.failure()
        except RankError as no_store:
            is_over, failure = False, str(no_store)
        if failure and not left.wait(GRACE):
            notes.tell("left", "")
            print(f"error: {failure}", file=sys.stderr, flush=True)
            os._exit(1)
        if is_over:
            return


def _own_process() -> tuple[str, int, float]:
    """This machine, with the space of its process numbers, which containers have of their own; and this process, whose
    start tells it from a later one of the same number."""
    space = os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else ""
    return f"{socket.gethostname()} {space}", os.getpid(), psutil.Process().create_time()


def _has_ended(machine: str, pid: int, created: float) -> bool:
    """Whether a process has ended, as far as this machine knows."""
    if machine != _own_process()[0]:
        return False
    try:
        process = psutil.Process(pid)
        return process.create_time() != created or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_broken_collective(error: Exception) -> bool:
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error)
    is_runtime = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return is_runtime and ("gloo" in text or "Connection" in text or "NCCL" in text)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
