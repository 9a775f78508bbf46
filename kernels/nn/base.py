"""The base class of the layers: PyG's `MessagePassing` where PyG is installed, so that its tools (`to_hetero`,
explainers, `get_message_passing_embeddings`) recognise them; elsewhere `torch.nn.Module`."""

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

if TYPE_CHECKING:
    MessagePassing = nn.Module
else:
    try:
        from torch_geometric.nn import MessagePassing
    except ModuleNotFoundError as error:
        if error.name != "torch_geometric":
            raise  # PyG is installed, and broken
        MessagePassing = nn.Module

STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")  # PyG has hooks of each


class Layer(MessagePassing):
    """A layer without messages: `propagate` is never called. Message-passing methods of a subclass, an explainer's edge
    mask and message hooks would silently have no effect, so they raise an error."""

    _alpha = None  # as in PyG's attention layers, outside of a call

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        new = [base for base in cls.__mro__ if base is cls or not issubclass(base, Layer)]  # PyG writes into the others
        for name in (*STEPS, "update"):
            if any(name in vars(base) for base in new if base.__module__.partition(".")[0] != "torch_geometric"):
                raise TypeError(
                    f"{cls.__name__}.{name}: never called by a layer of fused3s, which makes no messages; "
                    "subclass PyG's layer, or write the score as a fused3s.ScoreTerm for fused3s.sparse_attention"
                )

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError("torch.jit.script: cannot compile the layers of fused3s; torch.export does")

    @property
    def explain(self) -> None:
        return None

    @explain.setter
    def explain(self, explain: bool | None) -> None:
        if explain:
            self._refuse_hook()

    def _refuse_hook(self, *hook: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} makes no messages that an explainer or a hook could see: take PyG's layer with the "
            "same state dict, or return_attention_weights"
        )


for _step in STEPS:
    for _when in ("forward_pre", "forward"):
        setattr(Layer, f"register_{_step}_{_when}_hook", Layer._refuse_hook)
