"""The calls that bench/parallel.py times are the work of a rank: their output against float64."""

from contextlib import ExitStack

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import dense_attention
from bench_runs import config, run
from poison import poisoned_buffers

from bench.parallel import Work
from bench.runner import Case
from parallel import Group, partition_graph, plan_part_attention
from parallel.passes import SplitPasses
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, cuda_on_cpu

NODES, PARTS, HEADS, DIM = 90, 3, 2, 8
no_compiler = NEEDS_COMPILER


@pytest.mark.parametrize(
    ("backend", "place"),
    [
        ("reference", "cpu"),
        pytest.param("fused3s", "shim", marks=no_compiler),
        pytest.param("fused3s", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_parts_of_each_rank(monkeypatch, backend, place):
    mask = np.random.default_rng(0).random((NODES, NODES)) < 0.1
    parts = np.random.default_rng(1).integers(2, size=NODES).astype(np.int32)
    parts[60:] = 2
    mask[60:, :60] = mask[:60, 60:] = False  # the third part sends and receives nothing
    matrix = sp.csr_array(mask)
    device = torch.device("cuda" if place == "cuda" else "cpu")
    generator = torch.Generator().manual_seed(2)
    qkv = [torch.randn(NODES, HEADS, DIM, generator=generator).half() for _ in range(3)]
    expected = dense_attention(*qkv, torch.from_numpy(mask), DIM**-0.5)
    with ExitStack() as stack:
        if place == "shim":
            stack.enter_context(cuda_on_cpu())
            stack.enter_context(poisoned_buffers(monkeypatch))
        for rank, part in enumerate(partition_graph(matrix, PARTS, "contiguous", parts)):
            group = Group(rank, PARTS, device, "gloo")
            options = {"dtype": torch.float16, "head_dim": DIM, "num_heads": HEADS}
            passes = plan_part_attention(part, group, backend=backend, **options)
            assert isinstance(passes.passes, SplitPasses)
            work = Work.__new__(Work)
            work.case, work.device, work.scale = Case(backend, "attention", DIM), device, DIM**-0.5
            work.qkv = [each.to(device) for each in qkv]
            calls = work._calls(part, passes)
            rows = torch.from_numpy(part.rows)
            output = work._output(calls)
            assert output.dtype == torch.float16
            torch.testing.assert_close(output.cpu().double(), expected[rows], rtol=2e-3, atol=1e-3)
            assert list(calls) == (["own"] if rank == 2 else ["pack", "own", "halo", "combine"])
            if "pack" in calls:
                sent = rows[part.send_rows]
                assert torch.equal(calls["pack"]().cpu(), torch.stack([each[sent] for each in qkv[1:]], 1))
                assert all(calls[name]()[0].dtype == torch.float16 for name in ("own", "halo"))
                for _ in range(50):  # as often as a timer likes
                    repeated = calls["combine"]()
                assert repeated.isfinite().all()


def test_the_whole_graph_and_the_parts_of_every_rank_are_rows(tmp_path):
    pytest.importorskip("pymetis", reason="pymetis, which divides the graph, is not installed")
    small = ["backends=[reference]", "precisions=[float32]", "ranks=[2]", "shapes=[2x8]", "repeats=2"]
    status, rows = run(config("parallel", *small, f"root={tmp_path}"), tmp_path / "r.csv")
    assert status == 0
    whole, *parts = rows
    assert (whole.ranks, whole.variant, whole.region) == (1, "none", "none")
    assert {(row.ranks, row.variant, row.order) for row in parts} == {(2, "halo", "metis")}
    assert [row.region for row in parts] == [
        f"{part} of rank {rank}" for rank in (0, 1) for part in ("pack", "own", "halo", "combine")
    ]
