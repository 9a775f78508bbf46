"""A stand-in for `kernels.PlanRoom` on the CPU: the reference backend over the arrays of the last `fill`."""

from kernels import plan_attention
from kernels.formats.csr import CSRPattern


class ReferenceRoom:
    """As `kernels.PlanRoom`. `fills` counts the graphs."""

    def __init__(self, shape, num_edges, *, device, dtype, head_dim, num_heads=1, backward=False):
        self.shape, self.num_edges, self.fills = shape, num_edges, 0

    def fill(self, edges):
        indptr, indices = edges
        assert indptr.shape == (self.shape[0] + 1,)
        assert indices.shape == (self.num_edges,)
        used = int(indptr[-1])
        assert (indices[used:] == -1).all()
        self.fills += 1
        self._plan = plan_attention(CSRPattern(indptr, indices[:used], self.shape), backend="reference", device="cpu")

    def plan(self, q, k, v, **options):
        return self._plan(q, k, v, **options)


class CalledAgain:
    """A stand-in for a CUDA graph: a replay calls the function."""

    def __init__(self, run, device, launches=1):
        run()
        self.replay = run
