"""Execution of a forward pass: implementation of the non-attention layers, eager or as a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.runtime.cuda_graph import CaptureError, capture
from models.dense import Dense, DensePath, choose_dense
from models.graph_inputs import Attention, GraphInputs
from models.graph_transformer import GraphTransformer


class CudaGraphError(RuntimeError):
    """A forward pass cannot be captured in a CUDA graph; the text names the attention backend and the reason."""


@dataclass(frozen=True, eq=False)
class Execution:
    """A model on one graph, ready to run.

    Attributes:
        dense: implementation of the non-attention layers, and why it was chosen.
        captured: the CUDA graph; None for eager execution.
        graph_reason: why there is a CUDA graph, or none.
    """

    model: GraphTransformer
    inputs: GraphInputs
    dense: Dense
    captured: "CapturedForward | None"
    graph_reason: str

    @property
    def mode(self) -> str:
        """The path of the non-attention layers, with "+graph" for a CUDA graph: "plain", "fused+graph"."""
        return self.dense.path + ("+graph" if self.captured else "")

    def run(self) -> Tensor:
        """Logits. A CUDA graph writes them to one buffer, which the next run overwrites.

        Raises:
            StaleWeightsError: the weights changed after the compiled or the fused path copied them.
        """
        if not self.captured:
            return self.eager()
        self.dense.check_weights()
        return self.captured.replay()

    def eager(self, attention: Attention | None = None) -> Tensor:
        """Logits of an eager pass; `attention` replaces that of the inputs."""
        self.dense.check_weights()
        inputs = self.inputs if attention is None else replace(self.inputs, attention=attention)
        return self.model(inputs, self.dense.blocks, self.dense.embed)


class CapturedForward:
    """The work of `run` as a CUDA graph, captured once for the tensors (and shapes) that `run` reads.

    A replay reads the same tensors again: to run on other features of the same graph, copy them into `inputs.features`.

    Raises:
        CudaGraphError: the work cannot be captured, for example because the backend waits for the GPU.
    """

    def __init__(self, run: Callable[[], Tensor], backend: str, device: torch.device) -> None:
        try:
            self._graph = capture(run, device)
        except CaptureError as error:
            raise CudaGraphError(
                f"a forward pass with the attention backend {backend} cannot be captured in a CUDA graph: {error}"
            ) from error

    def replay(self) -> Tensor:
        return self._graph.replay()


def prepare_execution(
    model: GraphTransformer,
    inputs: GraphInputs,
    *,
    backend: str,
    dense: Literal["auto"] | DensePath = "auto",
    cuda_graph: bool | Literal["auto"] = "auto",
) -> Execution:
    """Choose the implementation, and capture a CUDA graph if configured.

    Call it under `torch.inference_mode()`, and again after loading other weights.

    Args:
        model, inputs: on one device; `inputs` come from `model.prepare`.
        backend: name of the attention backend, for messages.
        dense: see `models.dense`.
        cuda_graph: whether to capture the pass; "auto": if possible.

    Raises:
        DenseUnavailableError, CudaGraphError: the requested execution is not available; the text is the reason.
    """
    chosen = choose_dense(model, dense)
    eager = Execution(model, inputs, chosen, None, "as configured")
    if cuda_graph is False:
        return eager
    asked = "chosen by auto" if cuda_graph == "auto" else "as configured"
    try:
        device = inputs.features.device
        if device.type != "cuda":
            raise CudaGraphError(f"a CUDA graph needs an NVIDIA GPU, and the model is on {device}")
        return replace(eager, captured=CapturedForward(eager.eager, backend, device), graph_reason=asked)
    except CudaGraphError as error:
        if cuda_graph is True:
            raise
        return replace(eager, graph_reason=f"{asked}; {error}")
