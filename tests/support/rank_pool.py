"""Processes of a gloo group on the CPU that take jobs, since importing torch for each test would take seconds."""

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

RANKS = 4
GPUS = [size for size in (2, 4, 8) if size <= max(2, torch.cuda.device_count())]  # ranks of a test on GPUs
JOB_SECONDS = 60  # a job that hangs is a failed test
AFTER_A_FAILURE = 2  # seconds for the other ranks, which may wait for the failed one
PRELOADED = ["clone", "torch", "torch.distributed", "parallel_jobs", "parallel.inference"]


def fork_context() -> Any:
    """Children are forked from one process that has imported PRELOADED and started nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not hand sys.path on to that process
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def launch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class RankPool:
    """RANKS processes, started by the first job; a job runs on the first of them. A job that fails ends them."""

    def __init__(self) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def run(self, job: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """job(group, *arguments) on `size` ranks; the result of each."""
        if not self.processes:
            self._start()
        content = pickle.dumps(arguments)  # bytes of tensors: shared memory would show one rank what another one writes
        for pipe in self.pipes[:size]:
            pipe.send((job, size, content))
        found, texts = [], []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(AFTER_A_FAILURE if texts else JOB_SECONDS):
                texts.append(f"rank {rank} did not answer")
                continue
            succeeded, result = pipe.recv()
            if succeeded:
                found.append(pickle.loads(result))
            else:
                texts.append(f"rank {rank}:\n{result}")
        if texts:
            self.close()
        assert not texts, "\n".join(texts)
        return found

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

    def _start(self) -> None:
        context, port = fork_context(), free_port()
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)


def run_alone(job: Callable[..., Any], size: int, arguments: Sequence[Any], seconds: float = 30.0) -> list[Any]:
    """job(rank, *arguments) in new processes with the variables of torchrun; the exit code, or what the job returned.

    Raises:
        TimeoutError: a process did not end.
    """
    context, port, content = fork_context(), free_port(), pickle.dumps(arguments)
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_once, args=(job, rank, size, port, content, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    found = []
    for rank, (process, pipe) in enumerate(started):
        if not pipe.poll(seconds):
            for one, _ in started:
                one.kill()
            raise TimeoutError(f"rank {rank} did not end within {seconds} s")
        try:
            found.append(pickle.loads(pipe.recv()))  # before join: a process waits until what it sends is read
            process.join()
        except EOFError:
            process.join()
            found.append(process.exitcode)
    return found


def _serve(rank: int, port: int, pipe: Any) -> None:
    import parallel_jobs
    import torch
    import torch.distributed as dist

    from parallel.group import Group

    torch.set_num_threads(1)
    parallel_jobs.register_backends()
    os.environ.update(launch_variables(rank, RANKS, port))
    dist.init_process_group("gloo")
    handles = {size: dist.new_group(list(range(size))) for size in range(1, RANKS + 1)}
    while True:
        try:
            job, size, content = pipe.recv()
        except (EOFError, ConnectionError):  # the tests are over
            return
        group = Group(rank, size, torch.device("cpu"), "gloo", handles[size])
        try:
            pipe.send((True, pickle.dumps(job(group, *pickle.loads(content)))))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _run_once(job: Callable[..., Any], rank: int, size: int, port: int, arguments: bytes, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(launch_variables(rank, size, port))
    pipe.send(pickle.dumps(job(rank, *pickle.loads(arguments))))
