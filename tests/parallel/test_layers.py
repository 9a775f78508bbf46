"""Layers of `fused3s.nn` under DDP, FSDP and FSDP2 in two processes, beside PyG's layers in one (docs/threads.md)."""

import layer_jobs
import pytest
import torch

EACH = "FSDP2 of each module"


@pytest.mark.parametrize("backend", ["formula", "scatter"])
@pytest.mark.parametrize(
    ("kind", "how"), [(kind, how) for kind in layer_jobs.KINDS for how in ("DDP", "FSDP", "FSDP2", EACH)]
)
def test_a_layer_is_that_of_one_process(pool, kind, how, backend):
    for expected, found in pool.run(layer_jobs.layer_results, 2, kind, backend, how):
        for name, each in found.items():
            torch.testing.assert_close(
                each, expected[name], rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_a_layer_without_root_weight_has_a_parameter_that_ddp_must_be_told_of(pool):
    for text in pool.run(layer_jobs.layer_without_root, 2, False):
        assert "Expected to have finished reduction in the prior iteration" in text
    assert pool.run(layer_jobs.layer_without_root, 2, True) == ["", ""]


@pytest.mark.parametrize("how", ["FSDP2", EACH])
def test_sparse_mha_is_sharded(pool, how):
    for expected, found in pool.run(layer_jobs.heads_of_shards, 2, how):
        torch.testing.assert_close(found, expected)
