"""GATConv, GATv2Conv and AGNNConv of `fused3s.nn.dgl` against those of DGL, and TransformerConv against PyG's."""

import re
from copy import deepcopy

import pytest
import torch
import torch_geometric.nn
from edge_cases import EDGE_LISTS

import fused3s
import fused3s.nn.dgl
from data.dgl import import_dgl

dgl = import_dgl()
pytestmark = pytest.mark.usefixtures("formula")
KINDS = "GATConv", "GATv2Conv", "AGNNConv"
IN, OUT, HEADS = 12, 4, 3


def named(argument):
    """Id of an argument, the same in every process: the text of a function has its address."""
    return re.sub(" at 0x[0-9a-f]+", "", str(argument))


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def from_list(name):
    """The graph of tests/support with a self-loop of each node added."""
    edges = EDGE_LISTS[name]()
    loops = torch.arange(min(edges.shape))
    source, destination = torch.cat([edges.col, loops]), torch.cat([edges.row, loops])
    return dgl.graph((source, destination), num_nodes=edges.shape[0])


def relation():
    """5 sources, 3 destinations, by one of two edge types."""
    ends = torch.tensor([0, 4, 2, 2, 1, 3]), torch.tensor([0, 1, 2, 2, 0, 1])
    graph = dgl.heterograph({("a", "to", "b"): ends, ("a", "of", "b"): ([0], [0])})
    return graph["to"]


def block():
    graph = from_list("hub")
    return dgl.to_block(dgl.in_subgraph(graph, [3, 7, 5]), [3, 7, 5])


GRAPHS = {
    "hub": lambda: from_list("hub"),
    "repeated": lambda: from_list("repeated"),
    "one node": lambda: from_list("one_node_no_edge"),
    "int32": lambda: from_list("directed").int(),
    "batch": lambda: dgl.batch([from_list("hub"), from_list("one_node_self_loop"), from_list("directed")]),
    "relation": relation,
    "block": block,
}


def feat_of(graph, pair=False):
    """Features, as a pair where the graph has two kinds of nodes."""
    sources = random(graph.num_src_nodes(), IN)
    if pair or not (graph.is_block or graph.is_homogeneous):
        return sources, random(graph.num_dst_nodes(), IN, seed=2)
    return sources


def two(kind, *sizes, dtype=torch.float64, backend="auto", **options):
    """DGL's layer and ours, of one seed, with DGL's parameters drawn anew."""
    sizes = () if kind == "AGNNConv" else sizes or (IN, OUT, HEADS)
    layers = []
    for package, more in ((dgl.nn, {}), (fused3s.nn.dgl, {"backend": backend})):
        torch.manual_seed(0)
        layers.append(getattr(package, kind)(*sizes, **options, **more))
    theirs, ours = layers
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.named_parameters()]
    if not (options.get("share_weights") and isinstance(sizes[0], tuple)):  # DGL forgets to draw fc_dst
        assert all(map(torch.equal, theirs.parameters(), ours.parameters()))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.3, 0.4)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    assert theirs.load_state_dict(ours.state_dict()) == ([], [])
    return theirs.to(dtype), ours.to(dtype)


def trained(layer, graph, feat, *more, dtype=torch.float64, **options):
    """Output, gradients of the inputs and of the parameters."""
    leaves = [each.to(dtype).requires_grad_() for each in (feat if isinstance(feat, tuple) else (feat,))]
    more = [each.clone().requires_grad_() for each in more]
    out = layer(graph, tuple(leaves) if len(leaves) == 2 else leaves[0], *more, **options)
    outputs = out if isinstance(out, tuple) else (out,)
    loss = sum((each * random(*each.shape, seed=3).to(dtype)).sum() for each in outputs)
    inputs = [*leaves, *more, *layer.parameters()]
    return [*(each.detach() for each in outputs), *torch.autograd.grad(loss, inputs, allow_unused=True)]


def assert_same(found, expected, **tolerance):
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 1e-9, "atol": 1e-9}))


@pytest.mark.parametrize("backend", ["auto", "formula"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_layer_of_dgl(kind, name, backend):
    graph = GRAPHS[name]()
    theirs, ours = two(kind, backend=backend)
    feat = feat_of(graph)
    expected = trained(theirs, graph, feat)
    assert_same(trained(ours, graph, feat), expected)
    if name == "hub" and backend == "auto":
        for mine, right in zip(trained(ours.float(), graph, feat, dtype=torch.float32), expected, strict=True):
            assert mine.dtype == torch.float32
            assert (mine - right).norm() <= 2e-6 * right.norm()


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
@pytest.mark.parametrize("kind", [*KINDS, "TransformerConv"])
def test_graphs_of_one_format(kind, form):
    """DGL's layers need two."""
    graph = GRAPHS["repeated"]()
    layer = getattr(fused3s.nn.dgl, kind)(*(() if kind == "AGNNConv" else (IN, OUT, HEADS))).double()
    options = {} if kind == "AGNNConv" else {"get_attention": True}
    found, expected = (trained(layer, each, feat_of(graph), **options) for each in (graph.formats(form), graph))
    assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_in_hetero_graph_conv(kind):
    ends = torch.tensor([0, 4, 2, 2, 1, 3]), torch.tensor([0, 1, 2, 2, 0, 1])
    graph = dgl.heterograph(
        {("a", "first", "b"): ends, ("a", "second", "b"): ([0], [0]), ("b", "third", "b"): ends[::-1]}
    )
    x, found = {"a": random(5, IN), "b": random(5, IN, seed=2)}, []
    pairs = {etype: two(kind) for etype in graph.etypes}
    for i in range(2):
        layer = dgl.nn.HeteroGraphConv({etype: pair[i] for etype, pair in pairs.items()})
        found.append(layer(graph, x)["b"])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hub", "block"])
@pytest.mark.parametrize("kind", [*KINDS, "TransformerConv"])
def test_a_graph_on_the_cpu_serves_features_on_a_gpu(kind, name):
    graph = GRAPHS[name]()
    layer = getattr(fused3s.nn.dgl, kind)(*(() if kind == "AGNNConv" else (IN, OUT, HEADS)))
    expected = trained(layer.double(), graph, feat_of(graph))
    layer.float().cuda()
    x = feat_of(graph).float().cuda().requires_grad_()
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(graph, x)
    out = layer(graph, x)
    (of_x,) = torch.autograd.grad((out * random(*out.shape, seed=3).float().cuda()).sum(), x)
    for mine, right in zip((out, of_x), expected, strict=False):
        assert (mine.cpu() - right).norm() <= 2e-6 * right.norm()


OPTIONS = [
    {"residual": True},  # a projection
    {"residual": True, "bias": False, "negative_slope": 0.05},
    {"bias": False, "activation": torch.nn.functional.elu},
    {"activation": torch.nn.ELU(), "attn_drop": 0.5, "feat_drop": 0.5},  # in eval mode
]


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("sizes", [(IN, OUT, HEADS), (IN, IN // HEADS, HEADS), ((IN, IN), OUT, HEADS)], ids=named)
@pytest.mark.parametrize("name", ["hub", "block", "relation"])
def test_arguments(kind, sizes, options, name):
    graph = GRAPHS[name]()
    if kind == "GATv2Conv" and "residual" not in options:
        options = options | {"share_weights": True}
    theirs, ours = two(kind, *sizes, **options)
    feat = feat_of(graph, pair=isinstance(sizes[0], tuple))
    assert_same(trained(ours.eval(), graph, feat), trained(theirs.eval(), graph, feat))


@pytest.mark.parametrize("learn_beta", [True, False])
def test_beta_of_agnn(learn_beta):
    graph = GRAPHS["hub"]()
    theirs, ours = two("AGNNConv", init_beta=1.7, learn_beta=learn_beta)
    assert_same(trained(ours, graph, feat_of(graph)), trained(theirs, graph, feat_of(graph)))
    ours.reset_parameters()
    assert ours.beta.item() == 1.7


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("name", ["repeated", "block", "relation"])
def test_attention_weights_are_in_the_order_of_edge_ids(kind, name):
    graph = GRAPHS[name]()
    theirs, ours = two(kind)
    given = graph, feat_of(graph)
    assert_same(trained(ours, *given, get_attention=True), trained(theirs, *given, get_attention=True))


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"bias": False, "activation": torch.relu}], ids=named)
@pytest.mark.parametrize("get_attention", [True, False])
@pytest.mark.parametrize("name", ["repeated", "block", "relation"])
def test_edge_weights_of_gat(name, get_attention, options):
    graph = GRAPHS[name]()
    theirs, ours = two("GATConv", **options)
    given = graph, feat_of(graph), random(graph.num_edges(), seed=4)  # negative ones, too
    assert_same(*(trained(layer, *given, get_attention=get_attention) for layer in (ours, theirs)))


def test_sums_of_edge_weights_in_bfloat16():
    graph = dgl.graph((torch.arange(2_000), torch.zeros(2_000, dtype=torch.int64)))
    layer = fused3s.nn.dgl.GATConv(1, 1, 1, allow_zero_in_degree=True).bfloat16()
    with torch.no_grad():
        layer.fc.weight.fill_(1)
    out = layer(graph, torch.ones(2_000, 1).bfloat16(), torch.full((2_000,), 2.0).bfloat16())
    assert out[0].item() == pytest.approx(2, rel=2**-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 3])
def test_nodes_without_in_edges(kind, count):
    graph = dgl.graph((torch.tensor([0, 1, 1])[:count], torch.tensor([1, 2, 2])[:count]), num_nodes=20)
    for layer in two(kind):
        with pytest.raises(dgl.DGLError, match=r"in-(edge|degree).*add_self_loop.*allow_zero_in_degree"):
            layer(graph, feat_of(graph))
    for layer in two(kind):
        layer.set_allow_zero_in_degree(True)
        layer(graph, feat_of(graph))
    star = dgl.graph((torch.zeros(20, dtype=torch.int64), torch.arange(20)))
    assert_same(*(trained(layer, star, feat_of(star)) for layer in two(kind)))  # without out-edges
    theirs, ours = two(kind, allow_zero_in_degree=True)
    assert_same(trained(ours, graph, feat_of(graph)), trained(theirs, graph, feat_of(graph)))


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_dropout_of_features_is_that_of_dgl_for_a_seed(kind, pair):
    graph, found = GRAPHS["hub"](), []
    for layer in two(kind, feat_drop=0.5, residual=True):
        torch.manual_seed(7)
        found.append(trained(layer, graph, feat_of(graph, pair)))
    assert_same(*found)
    assert (found[0][1] == 0).any()  # the gradient of what was dropped


def test_dropout_of_weights_with_edge_weights_is_that_of_dgl_for_a_seed():
    graph, found = GRAPHS["repeated"](), []
    for layer in two("GATConv", attn_drop=0.5):
        torch.manual_seed(7)
        found.append(trained(layer, graph, feat_of(graph), random(graph.num_edges(), seed=4), get_attention=True))
    assert_same(*found)


@pytest.mark.parametrize("kind", [*KINDS[:2], "TransformerConv"])
def test_dropout_of_weights(kind):
    torch.manual_seed(0)
    graph, ones = dgl.rand_graph(400, 8_000), torch.ones(400, 1)
    rate = "dropout" if kind == "TransformerConv" else "attn_drop"
    layer = getattr(fused3s.nn.dgl, kind)(1, 1, 1, **{rate: 0.25})
    layer._allow_zero_in_degree = True
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(float(name in ("fc.weight", "fc_src.weight", "lin_value.weight")))
    found = layer(graph, ones)
    assert found.mean().item() == pytest.approx(1, abs=0.02)
    assert found.std().item() == pytest.approx((0.25 / 0.75 / 20) ** 0.5, rel=0.2)
    with pytest.raises(ValueError, match=r"get_attention.* 0\.25 .*eval mode"):
        layer(graph, ones, get_attention=True)
    _, weights = layer.eval()(graph, ones, get_attention=True)
    assert weights.shape == (8_000, 1, 1)
    torch.testing.assert_close(layer(graph, ones).flatten(), torch.ones(400))


@pytest.mark.parametrize("kind", [*KINDS, "TransformerConv"])
def test_wrong_arguments(kind):
    layer = getattr(fused3s.nn.dgl, kind)(*(() if kind == "AGNNConv" else (IN, OUT, HEADS)))
    graph, feat = GRAPHS["hub"](), feat_of(GRAPHS["hub"]()).float()
    several = dgl.heterograph({("a", "to", "a"): ([0], [0]), ("a", "of", "a"): ([0], [0])})
    with pytest.raises(ValueError, match=r"2 edge types; take one of them, graph\[etype\]"):
        layer(several, feat[:1])
    with pytest.raises(TypeError, match="graph: got Tensor; a DGLGraph is needed"):
        layer(torch.zeros(2, 5, dtype=torch.int64), feat)
    with pytest.raises(ValueError, match=f"feat: got rows of 3 sources and 3 dest.* the graph has {len(feat)} and"):
        layer(graph, feat[:3])
    with pytest.raises(ValueError, match=r"feat: got torch.float32 \(2, 3, 12\); .* \[N, F\] is needed"):
        layer(graph, torch.zeros(2, 3, 12))
    if kind == "GATConv":
        with pytest.raises(ValueError, match=r"edge_weight: got shape \(3,\)"):
            layer(graph, feat, torch.ones(3))
    if kind in KINDS[:2]:
        with pytest.raises(ValueError, match="in_feats: got -1"):
            getattr(fused3s.nn.dgl, kind)(-1, OUT, HEADS)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    "options", [{}, {"edge_dim": 5, "beta": True}, {"concat": False, "root_weight": False}], ids=named
)
def test_transformer_conv_is_the_layer_of_pyg(name, options):
    graph, edge_dim = GRAPHS[name](), options.get("edge_dim")
    torch.manual_seed(0)
    theirs = torch_geometric.nn.TransformerConv(IN, OUT, HEADS, **options).double()
    ours = fused3s.nn.dgl.TransformerConv(IN, OUT, HEADS, **options).double()
    ours.load_state_dict(theirs.state_dict())
    feat, more = feat_of(graph), ()
    if edge_dim:
        more = (random(graph.num_edges(), edge_dim, seed=5),)

    def of_pyg(graph, feat, *more, get_attention):
        x = feat if isinstance(feat, tuple) else (feat, feat[: graph.num_dst_nodes()])
        out, (_, weights) = theirs(x, torch.stack(graph.edges()).long(), *more, return_attention_weights=True)
        return out, weights[..., None]

    of_pyg.parameters = theirs.parameters
    found = trained(ours, graph, feat, *more, get_attention=True)
    assert_same(found, trained(of_pyg, graph, feat, *more, get_attention=True))
    torch.testing.assert_close(ours(graph, feat, *more), found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_copies_and_other_types(kind, tmp_path):
    """Renamed parameters are one with what the layer reads."""
    graph = GRAPHS["hub"]()
    theirs, ours = two(kind, residual=True)
    expected = theirs(graph, feat_of(graph))
    torch.save(ours, tmp_path / "layer.pt")
    for copy in (torch.load(tmp_path / "layer.pt", weights_only=False), deepcopy(ours)):
        torch.testing.assert_close(copy(graph, feat_of(graph)), expected, rtol=1e-9, atol=1e-9)
    doubled = {name: 2 * each for name, each in ours.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(ours, doubled, (graph, feat_of(graph)))
        for parameter in theirs.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(found, theirs(graph, feat_of(graph)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "TransformerConv"])
def test_compiled(kind):
    graph = GRAPHS["hub"]()
    layer = getattr(fused3s.nn.dgl, kind)(*(() if kind == "AGNNConv" else (IN, OUT, HEADS))).double()
    compiled = torch.compile(layer, backend="aot_eager")
    assert_same([compiled(graph, feat_of(graph))], [layer(graph, feat_of(graph))])
