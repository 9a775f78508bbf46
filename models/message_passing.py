"""The layers as `torch_geometric.nn.MessagePassing`, for the tools of PyG that look for it, such as `to_hetero`.

    from models.message_passing import FusedTransformerConv   # in place of `from models import FusedTransformerConv`
    model = to_hetero(GNN(), data.metadata())

They compute the same. Needs PyG, which the other modules of this folder do not import.
"""

from typing import Any, NoReturn

from torch_geometric.nn import MessagePassing

import models


class _WithoutMessages(MessagePassing):
    """`propagate` is never called, so that an explainer or a hook of messages would silently leave the layer out."""

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


class FusedAGNNConv(models.FusedAGNNConv, _WithoutMessages):
    __doc__ = models.FusedAGNNConv.__doc__


class FusedGATConv(models.FusedGATConv, _WithoutMessages):
    __doc__ = models.FusedGATConv.__doc__


class FusedGATv2Conv(models.FusedGATv2Conv, _WithoutMessages):
    __doc__ = models.FusedGATv2Conv.__doc__


class FusedTransformerConv(models.FusedTransformerConv, _WithoutMessages):
    __doc__ = models.FusedTransformerConv.__doc__
