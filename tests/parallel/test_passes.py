"""`SplitPasses` of all parts of a graph in one process, without a group: the kernels of fused3s, pack and combine, on
the CPU (tests/cuda_shim) and on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from poison import poisoned_buffers

from fused3s import Dropout
from parallel import Group, partition_graph, plan_part_attention
from parallel.passes import Call
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu
from tests.cuda_shim.oracle import assert_attention

NODES, PARTS = 120, 3
PLACES = [
    pytest.param("cpu", marks=NEEDS_COMPILER),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def partition():
    """The parts and the matrix: two parts of rows at random, and one without a halo. Some rows have own columns alone,
    some halo columns alone, some none."""
    generator = np.random.default_rng(0)
    mask = generator.random((NODES, NODES)) < 0.08
    parts = np.where(np.arange(NODES) < 80, generator.integers(2, size=NODES), 2).astype(np.int32)
    mask &= (parts == 2)[:, None] == (parts == 2)
    mask[3] = mask[90] = False
    mask[5] &= parts == parts[5]
    mask[6] &= parts != parts[6]
    matrix = sp.csr_array(mask)
    return partition_graph(matrix, PARTS, "contiguous", parts), matrix


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 16), (3, 6), (2, 1)])
def test_parts_give_the_rows_of_the_whole_graph(partition, monkeypatch, place, dtype, heads, dim):
    parts, matrix = partition
    qkv = torch.randn(NODES, 3, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    of_parts = [qkv[torch.from_numpy(part.rows)].to(place).unbind(1) for part in parts]
    joined = torch.full((NODES, heads, dim), torch.nan, dtype=dtype)
    with cuda_on_cpu(MODES["random"]) if place == "cpu" else nullcontext() as shim:
        attentions = [
            plan_part_attention(
                part,
                Group(rank, PARTS, torch.device(place), "gloo"),
                backend="fused3s",
                dtype=dtype,
                head_dim=dim,
                num_heads=heads,
            )
            for rank, part in enumerate(parts)
        ]
        with poisoned_buffers(monkeypatch):
            packed = [
                attention.passes.exchange.pack(*tensors[1:]).split(attention.passes.exchange.send_counts)
                for attention, tensors in zip(attentions, of_parts, strict=True)
            ]
        for rank, (attention, tensors, part) in enumerate(zip(attentions, of_parts, parts, strict=True)):
            arrived = torch.cat([of_sender[rank] for of_sender in packed])
            exchanged = SimpleNamespace(wait=lambda arrived=arrived: arrived)
            monkeypatch.setattr(attention.passes.exchange, "start", lambda *_, exchanged=exchanged: exchanged)
            with poisoned_buffers(monkeypatch):
                joined[torch.from_numpy(part.rows)] = attention(*tensors).cpu()
    assert_attention(joined, list(qkv.unbind(1)), matrix, dim**-0.5, f"H = {heads}, d = {dim}, {dtype}")
    if place == "cpu":  # nothing leaves or reaches the third part
        names = [name.split("<")[0] for name in shim.launched]
        assert [names.count(name) for name in ("pack_rows", "combine_rows")] == [2, 2]


def test_each_plan_of_each_rank_draws_a_mask_of_its_own(partition):
    call, shape, seeds = Call(1.0, torch.float32, Dropout(0.1, 5)), {"dtype": torch.float32, "head_dim": 8}, []
    for rank, part in enumerate(partition[0]):
        group = Group(rank, PARTS, torch.device("cpu"), "gloo")
        passes = plan_part_attention(part, group, backend="reference", **shape).passes
        seeds += [int(call.mask(number, group.device).seed) for number in passes.masks]
    assert len(set(seeds)) == 2 * PARTS
