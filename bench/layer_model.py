"""The model of `bench.layers` around PyG's layer or ours, a training step of it, and its errors against float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench import checks
from bench.layer_batches import IGNORED, Block, LayerBatch
from configs.bench import Shape

EXACT_EDGES = 1 << 22  # of a float64 pass of PyG's layer, whose messages are [edges, heads, columns]


@dataclass(frozen=True)
class Types:
    """Types of a precision.

    Attributes:
        parameters: of weights and features.
        inputs: of q, k and v.
        matmul: `torch.get_float32_matmul_precision()`; TF32 is "high".
    """

    parameters: torch.dtype
    inputs: torch.dtype
    matmul: str = "highest"

    @property
    def autocast(self) -> bool:
        return self.parameters != self.inputs


TYPES = {
    "float32": Types(torch.float32, torch.float32),
    "tf32": Types(torch.float32, torch.float32, "high"),
    "autocast": Types(torch.float32, torch.bfloat16),
    "bfloat16": Types(torch.bfloat16, torch.bfloat16),
}


def run_layer(layer: nn.Module, x: Tensor, block: Block) -> Tensor:
    is_square = block.num_sources == block.num_targets
    return layer(x if is_square else (x, x[: block.num_targets]), block.edge_index, block.edge_attr)


RunLayer = Callable[[nn.Module, Tensor, Block], Tensor]


class LayerModel(nn.Module):
    """Layers of one kind, with LayerNorm and ReLU between them.

    Args:
        layer: a class with the arguments of `torch_geometric.nn.TransformerConv`.
        shape: heads and columns of a head; x has as many columns as all heads.
    """

    def __init__(self, layer: type[nn.Module], shape: Shape, layers: int, edge_dim: int | None) -> None:
        super().__init__()
        options = {"heads": shape.heads, "edge_dim": edge_dim}
        self.layers = nn.ModuleList(layer(shape.width, shape.dim, **options) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(layers - 1))

    def forward(self, batch: LayerBatch, run: RunLayer = run_layer) -> Tensor:
        """[targets of the last block, columns].

        Args:
            run: `run_layer`, or another way to run each layer.
        """
        x = run(self.layers[0], batch.x, batch.blocks[0])
        for norm, layer, block in zip(self.norms, self.layers[1:], batch.blocks[1:], strict=True):
            x = run(layer, norm(x).relu(), block)
        return x


def run_in_parts(layer: nn.Module, x: Tensor, block: Block) -> Tensor:
    """`run_layer`, with the memory that the messages of EXACT_EDGES edges take."""
    return torch.cat([run_layer(layer, x, part)[rows] for rows, part in row_parts(block)])


def row_parts(block: Block) -> Iterator[tuple[slice, Block]]:
    """Ranges of targets, and the block with their edges alone: at most EXACT_EDGES, unless one target has more. A layer
    on such a block gives right rows for these targets."""
    target = block.edge_index[1]
    first_edge = torch.searchsorted(target.contiguous(), torch.arange(block.num_targets + 1, device=target.device))
    for rows, edges in checks.row_parts(first_edge, EXACT_EDGES):
        attr = None if block.edge_attr is None else block.edge_attr[edges]
        yield rows, replace(block, edge_index=block.edge_index[:, edges], edge_attr=attr)


class TrainingStep:
    """Forward pass, loss, backward pass and fused AdamW.

    Args:
        capturable: whether a CUDA graph can capture it.
    """

    def __init__(self, model: LayerModel, types: Types, capturable: bool = False) -> None:
        self.model, self.types = model, types
        self.device = next(model.parameters()).device
        self.optimiser = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)

    def __call__(self, batch: LayerBatch) -> Tensor:
        """The model's output before the step, [targets of the last block, columns]."""
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.types.autocast):
            output = self.model(batch)
            loss = cross_entropy(output.float(), batch.labels, ignore_index=IGNORED)
        loss.backward()
        self.optimiser.step()
        return output.detach()


class InferenceStep:
    """Forward pass without gradients."""

    def __init__(self, model: LayerModel, types: Types) -> None:
        self.model, self.types = model.eval(), types
        self.device = next(model.parameters()).device

    def __call__(self, batch: LayerBatch) -> Tensor:
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.types.autocast):
            return self.model(batch)


class LayerErrors(NamedTuple):
    """Against the same weights and inputs in float64.

    Attributes:
        output: largest error of a row, see `bench.checks.largest_row_error`.
        gradients: of all weights together: norm of the difference over the norm.
    """

    output: float
    gradients: float


def first_layer_errors(layer: nn.Module, exact: nn.Module, batch: LayerBatch, types: Types) -> LayerErrors:
    """Errors of the layer on the first block; of a large block in the first of `row_parts`.

    Args:
        exact: the layer in float64, of any weights.
        batch: features in the type of the layer's weights.
    """
    exact.load_state_dict(layer.state_dict())
    double = batch.to(batch.x.device, torch.float64)
    rows, part = next(row_parts(double.blocks[0]))
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.zeros(batch.blocks[0].num_targets, batch.x.shape[1])
    cotangent[rows] = torch.randn(cotangent[rows].shape, generator=generator)
    cotangent = cotangent.to(batch.x.device)
    with torch.autocast(batch.x.device.type, torch.bfloat16, enabled=types.autocast):
        output = run_layer(layer, batch.x, batch.blocks[0])
    found = _gradients(layer, output, cotangent)
    expected = run_layer(exact, double.x, part)
    right = _gradients(exact, expected, cotangent)
    of_output = checks.largest_row_error(output.detach()[rows], expected.detach()[rows])
    return LayerErrors(of_output, ((found - right).norm() / right.norm()).item())


def _gradients(layer: nn.Module, output: Tensor, cotangent: Tensor) -> Tensor:
    """Of all weights, in one float64 vector in the order of their names."""
    weights = [weight for _, weight in sorted(layer.named_parameters())]
    gradients = torch.autograd.grad(output, weights, cotangent.to(output.dtype))
    return torch.cat([gradient.double().flatten() for gradient in gradients])
