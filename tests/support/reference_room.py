"""Stand-ins on the CPU: the reference backend for a plan with room, and calls for the replays of a CUDA graph."""

import numpy as np
import scipy.sparse
import torch

from fused3s import captured_step, plan_attention
from fused3s.graph.csr import CSRPattern


class ReferenceRoom:
    """As `fused3s.PlanRoom`, for one or several `fills`."""

    def __init__(
        self, shape, num_edges, *, device, dtype, head_dim, num_heads=1, out_dtype=None, edge_data=False, backward=False
    ):
        self.shape, self.num_edges, self.fills, self.edge_data = shape, num_edges, 0, edge_data

    def fill(self, edges):
        self.fills += 1
        options = {"backend": "reference", "device": "cpu", "edge_data": self.edge_data}
        self.plan = plan_attention(self.pattern(edges), **options)

    def pattern(self, edges):
        if isinstance(edges, torch.Tensor):
            key, query = edges[:, edges[0] >= 0].numpy()
            assert len(key) <= self.num_edges
            return scipy.sparse.coo_array((np.ones(len(key)), (query, key)), self.shape)
        indptr, indices = edges
        assert (len(indptr), len(indices)) == (self.shape[0] + 1, self.num_edges)
        used = int(indptr[-1])
        assert (indices[used:] == -1).all()
        return CSRPattern(indptr, indices[:used], self.shape)


class CalledAgain:
    """As a CUDA graph of `run`: a replay calls it, and writes to the tensor of the first call, if it returns one."""

    def __init__(self, run, device):
        self.run, self.result = run, run()

    def replay(self):
        found = self.run()
        self.result = self.result.copy_(found) if isinstance(found, torch.Tensor) else found
        return self.result


def capture_steps_on_cpu(monkeypatch, *modules):
    """`capture_step` of these modules takes models on the CPU."""

    def capture_step(run, *states, shares=None):
        with captured_step.restored(states, torch.device("cpu")):
            return CalledAgain(run, torch.device("cpu"))

    for module in modules:
        monkeypatch.setattr(module, "capture_step", capture_step)
