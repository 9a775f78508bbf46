"""Implementations of the non-attention layers: the embedding, and the dense block between two attentions (output
projection, residual, norm, FFN, residual, norm, next QKV projection).

plain     torch's modules, at least one kernel each.
compiled  torch.compile of the functions between two attentions, so that attention causes no graph break. The first pass
          compiles for up to a minute, for static shapes (code for dynamic shapes is slower).
fused     one kernel from attention to attention (`dense.block`): LayerNorm, d = 64, 80, 96, 128, 160, 192
          and 256, any heads, fp16 and bf16, compute capability 9.0. It reads a packed copy of the weights.

compiled and fused compute the embedding as one aligned GEMM (`models.embedding.pack_embedding`), also with a packed
copy. Weights that change after their copies were made are an error at the next run: prepare the execution again.
The three round to the model's dtype in different places; their outputs agree within the tolerance of `--verify`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from dense.block import dense_block, dense_block_unavailable, pack_block
from models.embedding import pack_embedding
from models.graph_inputs import GraphInputs
from models.graph_transformer import DenseBlock, GraphTransformer, finish_and_project, finish_last

DensePath = Literal["plain", "compiled", "fused"]


class DenseUnavailableError(RuntimeError):
    """The requested implementation of the non-attention layers cannot run; the text is the reason."""


class StaleWeightsError(RuntimeError):
    """The weights changed after a path copied them. A run would mix old and new ones."""


@dataclass(frozen=True, eq=False)
class Dense:
    """The chosen implementation.

    Attributes:
        path: its name.
        reason: why it was chosen, and no faster one.
        blocks, embed: arguments of `GraphTransformer.forward`.
        copied: parameters that `blocks` and `embed` hold copies of, with their versions at the time of copying.
    """

    path: DensePath
    reason: str
    blocks: list[DenseBlock]
    embed: Callable[[GraphInputs], torch.Tensor]
    copied: tuple[tuple[torch.Tensor, int], ...] = ()

    def check_weights(self) -> None:
        """Raise a StaleWeightsError if a parameter changed after it was copied."""
        for parameter, version in self.copied:
            if parameter._version != version:
                raise StaleWeightsError(
                    f"the model's weights changed after the {self.path} path copied them: "
                    "call prepare_execution again after loading or updating weights"
                )


def choose_dense(model: GraphTransformer, requested: Literal["auto"] | DensePath = "auto") -> Dense:
    """Prepare the non-attention layers of a model that has its final device, dtype and weights.

    "auto" is fused if it can run, else plain, since compiling takes longer than most runs.

    Raises:
        DenseUnavailableError: "fused" was requested and cannot run.
    """
    if requested == "plain":
        return Dense("plain", "as configured", model.dense_blocks(), model.embed)
    if requested == "compiled":
        functions = (finish_and_project, finish_last)
        compiled = [torch.compile(function, fullgraph=True, dynamic=False) for function in functions]
        embed = pack_embedding(model.embedding)
        return Dense("compiled", "as configured", model.dense_blocks(*compiled), embed, _versions(model.embedding))
    reason = fused_unavailable(model)
    if reason is None:
        why = "chosen by auto" if requested == "auto" else "as configured"
        copied = _versions(model.embedding, *model.blocks)
        return Dense("fused", why, _fused_blocks(model), pack_embedding(model.embedding), copied)
    if requested == "fused":
        raise DenseUnavailableError(f"the fused dense block cannot run: {reason}")
    return Dense("plain", f"chosen by auto; not fused: {reason}", model.dense_blocks(), model.embed)


def _versions(*modules: nn.Module) -> tuple[tuple[torch.Tensor, int], ...]:
    """Parameters with their version counters, without those made in inference mode, which have none."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return tuple((parameter, parameter._version) for parameter in parameters if not parameter.is_inference())


def fused_unavailable(model: GraphTransformer) -> str | None:
    """The reason why the fused kernel cannot run this model; None if it can."""
    norm = model.blocks[0].norm1
    if not isinstance(norm, nn.LayerNorm):
        return f"it takes LayerNorm, and the model has {type(norm).__name__}"
    return dense_block_unavailable(model.device, model.dtype, norm.normalized_shape[0])


def _fused_blocks(model: GraphTransformer) -> list[DenseBlock]:
    next_weights = [*(block.qkv.weight for block in model.blocks[1:]), None]
    return [_fused_block(block, weight) for block, weight in zip(model.blocks, next_weights, strict=True)]


def _fused_block(block: nn.Module, next_qkv_weight: torch.Tensor | None) -> DenseBlock:
    if block.norm1.eps != block.norm2.eps:
        raise DenseUnavailableError(f"the two norms' eps differ: {block.norm1.eps} and {block.norm2.eps}")
    layers = (block.out, block.norm1, block.ffn_up, block.ffn_down, block.norm2)
    tensors = [tensor.detach() for layer in layers for tensor in (layer.weight, layer.bias)]
    following = None if next_qkv_weight is None else next_qkv_weight.detach()
    packed = pack_block(*tensors, following, block.norm1.eps)
    return lambda attn_out, h: dense_block(packed, attn_out, h)
