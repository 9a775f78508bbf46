"""The Graph Transformer and its attention by their formulas alone."""

import math

import torch


class ByHand:
    """The architecture once more, from the text of Dwivedi and Bresson, edge by edge in float64.

    `shift` is what the authors' code adds to the sum of the weights.
    """

    def __init__(self, model, shift=0.0):
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.model, self.shift = model, shift
        self.largest_score = 0.0

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)

    def norm(self, name, x):
        weights = self.weights
        if f"{name}.running_mean" in weights:
            mean, var = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
        else:
            mean, var = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def rest(self, block, x, h):
        h = self.norm(f"{block}.norm1", h + self.linear(f"{block}.out", x))
        ffn = self.linear(f"{block}.ffn_down", self.linear(f"{block}.ffn_up", h).relu())
        return self.norm(f"{block}.norm2", h + ffn)

    def embed(self, name, features):
        if features.is_floating_point():
            return self.linear(f"{name}.linear", features.double())
        tables = self.weights[f"{name}.table.weight"].split(getattr(self.model, name).cardinalities)
        return sum(table[features[:, c]] for c, table in enumerate(tables))

    def __call__(self, graph):
        model = self.model
        heads = model.blocks[0].heads
        source, target = (ends.tolist() for ends in graph.edges())
        edges = list(enumerate(zip(source, target, strict=True)))
        h = self.embed("embedding", graph.ndata["feat"])
        if model.random_walk:
            h = h + self.linear("walk_encoding", self.norm("walk_norm", graph.ndata["random_walk"].double()))
        e = self.embed("edge_embedding", graph.edata["feat"]) if model.edge_features != "none" else [0.0] * len(edges)
        sizes = graph.batch_num_nodes().tolist()
        for i in range(len(model.blocks)):
            q, k, v = (part.unflatten(1, (heads, -1)) for part in self.linear(f"blocks.{i}.qkv", h).chunk(3, dim=1))
            scale = 1 / math.sqrt(q.shape[2])
            if model.edge_features == "stream":
                projected = self.linear(f"edge_blocks.{i}.project", e).unflatten(1, (heads, -1))
                w = torch.stack([q[t] * k[s] * scale * projected[j] for j, (s, t) in edges])
                self.largest_score = max(self.largest_score, float(w.sum(2).abs().max()))
                score = w.sum(2).clamp(-5, 5)
            else:
                score = torch.stack([(q[t] * k[s]).sum(1) * scale + e[j] for j, (s, t) in edges])
            attended = torch.zeros_like(v)
            for node in range(graph.num_nodes()):
                mine = [j for j, t in enumerate(target) if t == node]
                if mine:
                    weight = score[mine].exp()
                    weight = weight / (weight.sum(0) + self.shift)
                    attended[node] = sum(weight[n, :, None] * v[source[j]] for n, j in enumerate(mine))
            if model.edge_features == "stream" and i < len(model.blocks) - 1:
                e = self.rest(f"edge_blocks.{i}", w.flatten(1), e)
            h = self.rest(f"blocks.{i}", attended.flatten(1), h)
        if model.task == "graph":
            h = torch.stack([part.mean(0) for part in h.split(sizes)])
        return self.linear(
            "readout.classes", self.linear("readout.hidden2", self.linear("readout.hidden1", h).relu()).relu()
        )


def dense_attention(graph):
    """softmax(scale q k^T masked by A) v with the whole matrix."""
    allowed = torch.zeros(graph.num_nodes(), graph.num_nodes(), dtype=torch.bool)
    key, query = (ends.long() for ends in graph.edges())
    allowed[query, key] = True

    def attend(q, k, v, *, scale, out_dtype):
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("hij,jhd->ihd", weights, v)

    return attend
