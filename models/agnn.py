"""AGNN layer of Thekumparampil et al. (2018, "Attention-based Graph Neural Network for Semi-supervised Learning"),
Equation 3 of the Fused3S paper: softmax(beta cos(H, H^T) masked by A) H, where A has self loops.

Cosine similarity is a dot product of rows of length 1, so that every attention backend computes it:

    plan = kernels.plan_attention(dgl.add_self_loop(dgl.remove_self_loop(graph)), dtype=h.dtype, head_dim=h.shape[1])
    out = AGNNLayer()(h, plan)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graph_inputs import Attention


class AGNNLayer(nn.Module):
    """One propagation with its learnable temperature beta, a scalar."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta))

    def forward(self, h: Tensor, attention: Attention) -> Tensor:
        """[N, d] -> [N, d] of the same type; a row of zeros has similarity 0 to all rows."""
        unit = F.normalize(h, dim=1, eps=torch.finfo(h.dtype).tiny)  # the default, 1e-12, is 0 in float16
        q, k, v = (tensor[:, None] for tensor in (self.beta * unit, unit, h))
        return attention(q.to(h.dtype), k, v, scale=1.0, out_dtype=h.dtype)[:, 0]
