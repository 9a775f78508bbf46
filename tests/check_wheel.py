"""The installed wheel, in an environment with nothing else: `make check-wheel` runs this file outside of the clone."""

import importlib.util

import torch

import fused3s

for name in (
    "baselines",
    "bench",
    "configs",
    "data",
    "dense",
    "inference",
    "kernels",
    "models",
    "parallel",
    "report",
    "results",
    "scripts",
):
    assert importlib.util.find_spec(name) is None, f"the wheel installs a package named {name}"
assert any((fused3s.runtime.source.CUDA_FOLDER / "ptx").iterdir()), "the wheel has no CUDA sources"

num_nodes, dim = 100, 32
generator = torch.Generator().manual_seed(0)
mask = torch.rand(num_nodes, num_nodes, generator=generator) < 0.1
mask[7] = False  # a row without an edge
q, k, v = torch.randn(3, num_nodes, dim, generator=generator).unbind()
output = fused3s.sparse_attention(q, k, v, mask.float().to_sparse_csr())

score = (q.double() @ k.double().T / dim**0.5).masked_fill(~mask, -torch.inf)
expected = torch.nan_to_num(torch.softmax(score, 1)) @ v.double()
error = float((output.double() - expected).abs().max() / expected.abs().max())
assert error < 1e-5, error
chosen = fused3s.plan_attention(mask.float().to_sparse_csr(), device="cpu").backend
print(f"{fused3s.__file__}: backend {chosen}, largest error {error:.1e}")
