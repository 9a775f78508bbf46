"""How a forward pass is run: which dense parts, and launched one kernel at a time or replayed as a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kernels.runtime.cuda_graph import CaptureError, capture
from models.dense import Dense, DensePath, choose_dense
from models.graph_inputs import Attention, GraphInputs
from models.graph_transformer import GraphTransformer


class CudaGraphError(RuntimeError):
    """A forward pass cannot be captured in a CUDA graph; the text names the attention back end and the reason."""


@dataclass(frozen=True, eq=False)
class Execution:
    """A model on one graph, ready to run.

    Attributes:
        dense: the way taken between two attentions, and why.
        captured: the CUDA graph; None where kernels are launched one at a time.
        graph_reason: why there is a CUDA graph, or none.
    """

    model: GraphTransformer
    inputs: GraphInputs
    dense: Dense
    captured: "CapturedForward | None"
    graph_reason: str

    @property
    def mode(self) -> str:
        """Such as "plain" or "fused+graph"."""
        return self.dense.path + ("+graph" if self.captured else "")

    def run(self) -> Tensor:
        """Logits. Those of a CUDA graph lie in one buffer, which the next run overwrites."""
        return self.captured.replay() if self.captured else self.eager()

    def eager(self, attention: Attention | None = None) -> Tensor:
        """Logits with every kernel launched from Python; `attention` stands in for the inputs' own."""
        inputs = self.inputs if attention is None else replace(self.inputs, attention=attention)
        return self.model(inputs, self.dense.parts, self.dense.embed)


class CapturedForward:
    """What `run` queues, as a CUDA graph: captured once, for the tensors and so the shapes that `run` reads.

    A replay reads those tensors anew: to run on other features of the same graph, copy them into `inputs.features`.

    Raises:
        CudaGraphError: the work cannot be captured, such as a back end's that waits for the GPU.
    """

    def __init__(self, run: Callable[[], Tensor], backend: str) -> None:
        try:
            self._graph, self._logits = capture(run)
        except CaptureError as error:
            raise CudaGraphError(
                f"a forward pass with the attention back end {backend} cannot be captured in a CUDA graph: {error}"
            ) from error

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._logits


def prepare_execution(
    model: GraphTransformer,
    inputs: GraphInputs,
    *,
    backend: str,
    dense: Literal["auto"] | DensePath = "auto",
    cuda_graph: bool | Literal["auto"] = "auto",
) -> Execution:
    """Choose, and capture if wanted. Call it under `torch.inference_mode()`, and again after loading other weights.

    Args:
        model, inputs: on one device; `inputs` come from `model.prepare`.
        backend: name of the attention back end, for messages.
        dense: see `models.dense`.
        cuda_graph: whether to capture the pass; "auto" where it can be.

    Raises:
        DenseUnavailableError, CudaGraphError: what was asked for cannot be had; the text is the reason.
    """
    chosen = choose_dense(model, dense)
    eager = Execution(model, inputs, chosen, None, "as configured")
    if cuda_graph is False:
        return eager
    asked = "chosen by auto" if cuda_graph == "auto" else "as configured"
    try:
        if inputs.features.device.type != "cuda":
            raise CudaGraphError(f"a CUDA graph needs an NVIDIA GPU, and the model is on {inputs.features.device}")
        return replace(eager, captured=CapturedForward(eager.eager, backend), graph_reason=asked)
    except CudaGraphError as error:
        if cuda_graph is True:
            raise
        return replace(eager, graph_reason=f"{asked}; {error}")
