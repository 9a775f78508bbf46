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


class Layer(MessagePassing):
    """A layer without messages: `propagate` is never called, so that an explainer's edge mask or a hook of messages
    would silently leave the layer out. Both get an error."""

    _alpha = None  # as in PyG's attention layers, outside of a call

    @property
    def explain(self) -> None:
        return None

    @explain.setter
    def explain(self, explain: bool | None) -> None:
        if explain:
            self.register_message_forward_hook()

    def register_message_forward_hook(self, *hook: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} makes no messages that an explainer or a hook could see: take PyG's layer with the "
            "same state dict, or return_attention_weights"
        )
