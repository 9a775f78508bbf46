"""Ranks that fail, that do not meet, and that disagree: a sentence on every rank, and never a hang."""

import os
import subprocess
import sys

import parallel_jobs
import pytest
import torch
from rank_pool import GPUS, run_alone

SECONDS = 15  # for the others to end, on a busy machine


# Rank 0 holds the store through which the others learn the reason.
@pytest.mark.parametrize(
    ("who", "how", "ends_with"),
    [
        (0, "raises", "failed: ValueError: the features hold a NaN"),
        (0, "killed", "ended without a reason"),
        (2, "killed", "ended without a reason"),
        (1, "killed before a broadcast", "ended without a reason"),
        (2, "killed at the meeting", "ended without a reason"),
    ],
)
def test_a_rank_that_ends_early_ends_the_others_with_its_name_and_reason(who, how, ends_with):
    found = run_alone(parallel_jobs.end_early, 3, [how, who])
    own = found.pop(who)
    assert own == -9 if "killed" in how else own[0] == "ValueError: the features hold a NaN"
    others = [rank for rank in range(3) if rank != who]
    for rank, (text, seconds) in zip(others, found, strict=True):
        assert f"rank {rank} stops, since rank {who} {ends_with}" in text
        assert seconds < SECONDS


def test_ranks_that_do_not_notice_a_killed_one_are_ended_and_late_ones_are_not(tmp_path):
    assert run_alone(parallel_jobs.end_late, 3, [True, tmp_path]) == [1, 1, -9]
    for rank in (0, 1):
        error = (tmp_path / f"{rank}.txt").read_text()
        assert f"error: rank {rank} stops, since rank 2 ended without a reason" in error
    assert run_alone(parallel_jobs.end_late, 3, [False, tmp_path]) == [f"{rank} left" for rank in range(3)]


# Rank 1 ends while the others replay a CUDA graph that waits for it.
KILLED = """
import os, signal, clone, torch
from fused3s.runtime.cuda_graph import capture
from parallel import ranks
from parallel.capture import capture_together
from parallel.collectives import sum_in_rank_order
with ranks("cuda") as group:
    tensor = torch.ones(1 << 20, device=group.device)
    run = lambda: sum_in_rank_order([tensor], group)
    captured = capture_together(lambda: capture(run, group.device), group)
    for count in range(1000):
        if group.rank == 1 and count == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        captured.replay()
        torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each rank")
def test_ranks_on_gpus_end_without_torchrun_when_one_is_killed():
    found = run_alone(parallel_jobs.end_early, GPUS[-1], ["killed", 1, "cuda"], seconds=50)
    assert found.pop(1) == -9
    assert all(one == 1 or "since rank 1 ended without a reason" in one[0] for one in found), found  # 1: by the thread


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each rank")
def test_torchrun_ends_the_others_when_a_rank_on_a_gpu_is_killed(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS[-1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command.append(str(tmp_path / "killed.py"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert "Signal 9 (SIGKILL) received" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "variables", "message"),
    [
        (1, [{"WORLD_SIZE": "3"}] * 2, "rank 2 did not come in time"),
        (60, [{"WORLD_SIZE": "3"}, {}], "WORLD_SIZE differs between ranks"),
        (60, [{"MASTER_PORT": "70000"}] * 2, "MASTER_PORT = 70000: a port from 1 to 65535 is needed"),
    ],
)
def test_ranks_that_do_not_meet_say_so(seconds, variables, message):
    found = run_alone(parallel_jobs.meet, 2, [seconds, variables])
    assert all(message in text for text in found), found


def test_what_must_agree_is_compared(pool):
    same = {"config": "abc", "weights": "12"}
    assert pool.run(parallel_jobs.agree, 3, [same] * 3) == [""] * 3
    texts = pool.run(parallel_jobs.agree, 3, [same, same | {"weights": "99"}, same])
    assert set(texts) == {"the ranks must agree, and differ in weights: rank 0, 2: 12; rank 1: 99"}
