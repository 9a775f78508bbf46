"""Ways to compute what lies between two attentions: output projection, residual, norm, FFN, residual, norm, next Q K V;
and the embedding.

plain     torch's modules, one kernel or more for each.
compiled  torch.compile of the same two functions, not of the model: attention never breaks the graph. The first pass
          compiles, for up to a minute, for its shapes alone: code for any shape is slower.
fused     one kernel from attention to attention (`kernels.dense_block`): LayerNorm, d = 64, 128, 256, fp16 and bf16,
          compute capability 9.0. It has a packed copy of the weights: choose again after loading others.

The last two take the embedding as one aligned product (`models.embedding.pack_embedding`), with a packed copy as well.
All three round to the model's dtype in different places, so that their outputs agree within `bench.verify`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from kernels.dense_block import dense_block, dense_block_unavailable, pack_block
from models.embedding import pack_embedding
from models.graph_inputs import GraphInputs
from models.graph_transformer import DensePart, GraphTransformer, finish_and_project, finish_last

DensePath = Literal["plain", "compiled", "fused"]


class DenseUnavailableError(RuntimeError):
    """The dense part cannot be computed in the way that was asked for; the text is the reason."""


@dataclass(frozen=True, eq=False)
class Dense:
    """The way taken.

    Attributes:
        path: which.
        reason: why that one and no faster one.
        parts, embed: for `GraphTransformer.forward`.
    """

    path: DensePath
    reason: str
    parts: list[DensePart]
    embed: Callable[[GraphInputs], torch.Tensor]


def choose_dense(model: GraphTransformer, requested: Literal["auto"] | DensePath = "auto") -> Dense:
    """Prepare the dense parts of a model that is on its device, in its dtype, with its weights.

    "auto" takes fused where it can run and else plain, since compiling takes longer than most runs.

    Raises:
        DenseUnavailableError: "fused" was asked for and cannot run.
    """
    if requested == "plain":
        return Dense("plain", "as configured", model.dense_parts(), model.embed)
    if requested == "compiled":
        functions = (finish_and_project, finish_last)
        compiled = [torch.compile(function, fullgraph=True, dynamic=False) for function in functions]
        return Dense("compiled", "as configured", model.dense_parts(*compiled), pack_embedding(model.embedding))
    reason = fused_unavailable(model)
    if reason is None:
        why = "chosen by auto" if requested == "auto" else "as configured"
        return Dense("fused", why, _fused_parts(model), pack_embedding(model.embedding))
    if requested == "fused":
        raise DenseUnavailableError(f"the fused dense part cannot run: {reason}")
    return Dense("plain", f"chosen by auto; not fused: {reason}", model.dense_parts(), model.embed)


def fused_unavailable(model: GraphTransformer) -> str | None:
    """Why the fused kernel cannot run this model; None when it can."""
    norm, weight = model.blocks[0].norm1, model.readout.classes.weight
    if not isinstance(norm, nn.LayerNorm):
        return f"it takes LayerNorm, and the model has {type(norm).__name__}"
    return dense_block_unavailable(weight.device, weight.dtype, norm.normalized_shape[0])


def _fused_parts(model: GraphTransformer) -> list[DensePart]:
    next_weights = [*(block.qkv.weight for block in model.blocks[1:]), None]
    return [_fused_part(block, weight) for block, weight in zip(model.blocks, next_weights, strict=True)]


def _fused_part(block: nn.Module, next_qkv_weight: torch.Tensor | None) -> DensePart:
    if block.norm1.eps != block.norm2.eps:
        raise DenseUnavailableError(f"the two norms' eps differ: {block.norm1.eps} and {block.norm2.eps}")
    layers = (block.out, block.norm1, block.ffn_up, block.ffn_down, block.norm2)
    tensors = [tensor.detach() for layer in layers for tensor in (layer.weight, layer.bias)]
    following = None if next_qkv_weight is None else next_qkv_weight.detach()
    packed = pack_block(*tensors, following, block.norm1.eps)
    return lambda attended, h: dense_block(packed, attended, h)
