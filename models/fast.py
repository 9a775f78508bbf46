"""The forward pass of a `GraphTransformer` with fewer kernels: three implementations of the dense block, the layers
between two attentions (output projection, FFN, norms, next QKV projection).

plain     The modules of the model, at least one kernel each.
compiled  torch.compile of the layers between two attentions, so that attention causes no graph break. The first pass
          compiles for up to a minute; in inference for static shapes (code for dynamic shapes is slower). "auto" never
          takes it.
fused     One kernel: LayerNorm, fp16 and bf16, any heads. In inference models.dense.block, d = 64, 80, 96, 128, 160,
          192 and 256, compute capability 9.0, which reads a packed copy of the weights. In training
          `models.fast_training`, also with batch norm.

In inference compiled and fused compute the embedding as one aligned GEMM (`models.embedding.pack_embedding`), also with
a packed copy. A change of weights after their copies were made (`models.execution.CopiedModules` notices it) is an
error at the next run: prepare the execution again. The three paths round to the model's dtype in different places;
their outputs agree within the tolerance of `--verify`. Modules of the fused paths are imported on use.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fused3s.runtime.device import cuda_unavailable
from models.embedding import pack_embedding
from models.graph_inputs import GraphInputs
from models.graph_model import GraphModel
from models.graph_transformer import (
    Block,
    DenseBlock,
    GraphTransformer,
    mlp,
    norm_options,
    successive_blocks,
    weights_of,
)

DensePath = Literal["plain", "compiled", "fused"]
Forward = Callable[[GraphInputs], Tensor]  # the model, or a `fast_forward` of it


class DenseUnavailableError(RuntimeError):
    """The requested implementation of the non-attention layers cannot run; the text is the reason."""


def fast_forward(
    model: GraphTransformer,
    embed: Callable[[GraphInputs], Tensor],
    begin: Callable[[], Sequence[DenseBlock]],
    readout: Callable[[Tensor], Tensor],
) -> Forward:
    """`GraphTransformer.forward` with the dense blocks replaced.

    Args:
        embed: inputs -> [N, d].
        begin: called at each pass; returns one DenseBlock per block.
        readout: [rows, d] -> logits.
    """

    def forward(inputs: GraphInputs) -> Tensor:
        blocks = begin()
        h = model.encode(embed(inputs), inputs)
        e = model.embed_edges(inputs)
        qkv = model.blocks[0].qkv(h)
        dropouts = model.attention_dropouts()
        for block, edge_block, dropout, dense in zip(model.blocks, model.edge_blocks, dropouts, blocks, strict=True):
            attended, e = block.attend(qkv, e, inputs, edge_block, dropout)
            h, qkv = dense(attended, h, *norm_options(block, inputs))
        return readout(model.rows(h, inputs))

    return forward


def choose_path(model: GraphModel, requested: Literal["auto"] | DensePath) -> tuple[DensePath, str]:
    """The path of inference, and why; "auto" is fused if it can run, else plain.

    Raises:
        DenseUnavailableError: "fused" was requested and cannot run.
    """
    why = "chosen by auto" if requested == "auto" else "as configured"
    if requested not in ("auto", "fused"):
        return requested, why
    if not (refused := fused_unavailable(model)):
        return "fused", why
    if requested == "fused":
        raise DenseUnavailableError(f"the fused dense block cannot run: {refused}")
    return "plain", f"{why}; not fused: {refused}"


def inference_forward(model: GraphModel, path: DensePath) -> tuple[Forward, Sequence[nn.Module]]:
    """The forward pass of a model with its final device, dtype and weights, and the modules whose weights it copied."""
    if path == "plain":
        return model, ()
    blocks = fused_blocks(model) if path == "fused" else compiled_blocks(model)
    forward = fast_forward(model, pack_embedding(model.embedding), lambda: blocks, model.readout)
    return forward, (model.embedding, *(model.blocks if path == "fused" else ()))


def begin_dense(model: GraphModel, requested: Literal["auto"] | DensePath) -> None:
    """Begin to compile the kernels that `inference_forward` will need, beside those of a plan."""
    if requested in ("auto", "fused") and not fused_unavailable(model):
        from fused3s.runtime.jit import compile_ahead
        from models.dense.block import block_instance

        dim, pairs = model.blocks[0].qkv.in_features, successive_blocks(model)
        instances = [block_instance(model.dtype, dim, following is not None) for _, following in pairs]
        compile_ahead(instances, model.device.index)


def training_path(model: GraphModel, requested: Literal["auto"] | DensePath) -> DensePath:
    """The path of a training step; "auto" is fused if it can run, else plain."""
    if requested != "auto":
        return requested
    return "plain" if fused_unavailable(model, training=True) else "fused"


def training_forward(model: GraphModel, path: DensePath, *, dynamic: bool = False) -> Forward:
    """The forward pass in training and evaluation, which reads the current weights.

    Args:
        dynamic: whether batches differ in their number of rows.
    """
    if path == "plain":
        return model
    if path == "compiled":
        blocks = compiled_blocks(model, dynamic)
        return fast_forward(model, model.embed, lambda: blocks, model.readout)
    from models.fast_ends import embed_in_training, readout_in_training
    from models.fast_training import FusedTraining

    # The readout of graphs has few rows, in float32.
    readout = readout_in_training(model.readout) if model.task == "node" else model.readout
    return fast_forward(model, partial(embed_in_training, model), FusedTraining(model).begin, readout)


def fused_unavailable(model: GraphModel, *, training: bool = False) -> str | None:
    """Why the fused path cannot run this model; None if it can."""
    if not isinstance(model, GraphTransformer):
        return f"it is of the Graph Transformer's blocks, and the model is a {type(model).__name__}"
    norm, dim = model.blocks[0].norm1, model.blocks[0].qkv.in_features
    if training:  # separate kernels may run what the single one cannot
        from models.separate_rows import separate_rows_unavailable

        return separate_rows_unavailable(model.device, model.dtype, dim)
    if not isinstance(norm, nn.LayerNorm):
        return f"it takes LayerNorm, and the model has {type(norm).__name__}"
    if differing := next((block for block in model.blocks if block.norm1.eps != block.norm2.eps), None):
        return f"the two norms' eps differ: {differing.norm1.eps} and {differing.norm2.eps}"
    if reason := cuda_unavailable(model.device):
        return reason
    from models.dense.block import dense_block_unavailable

    return dense_block_unavailable(model.device, model.dtype, dim)


def between_attentions(
    block: Block, following: Block | None, attended: Tensor, h: Tensor, *row_weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A DenseBlock made of the modules of a block and of the next block; row_weights of batch norm."""
    h = mlp(block, attended, h, *row_weights)
    return h, None if following is None else following.qkv(h)


def compiled_blocks(model: GraphTransformer, dynamic: bool = False) -> list[DenseBlock]:
    compiled = torch.compile(between_attentions, fullgraph=True, dynamic=dynamic)  # the blocks share its code
    return [partial(compiled, *pair) for pair in successive_blocks(model)]


def fused_blocks(model: GraphTransformer) -> list[DenseBlock]:
    """Dense blocks by the inference kernel, with packed copies of the weights."""
    from models.dense.block import dense_block, pack_block

    blocks = []
    for block, following in successive_blocks(model):
        weights = [weight.detach() for weight in weights_of(block, following)]
        qkv_weight = None if following is None else weights.pop()
        blocks.append(partial(dense_block, pack_block(*weights, qkv_weight, block.norm1.eps)))
    return blocks
