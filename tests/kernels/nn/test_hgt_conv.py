"""HGTConv: the layer of PyTorch Geometric, on one merged graph."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import EdgeIndex

import fused3s.nn
from fused3s.nn import hgt_conv
from fused3s.nn.cached import merged_edges

pytestmark = pytest.mark.usefixtures("formula")
COLUMNS = {"paper": 8, "author": 5, "venue": 4}
WRITES, CITES, HAS, IN = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "has", "author"),
    ("paper", "in", "venue"),
)
ALL = {WRITES: 60, CITES: 90, HAS: 40, IN: 30}
# Nodes of each kind, edges of each relation; a relation that is not named is missing from the call
CASES = {
    "several kinds": ((37, 9, 5), ALL),
    "one relation of many": ((16, 7, 3), {CITES: 50}),
    "empty relation": ((16, 7, 3), ALL | {WRITES: 0}),
    "no edges": ((16, 7, 3), dict.fromkeys(ALL, 0)),
    "repeated edges": ((2, 2, 1), ALL),
    "one node of each kind": ((1, 1, 1), dict.fromkeys(ALL, 1)),
    "a kind without nodes": ((17, 0, 1), {CITES: 40, WRITES: 0, IN: 20}),
    "hub": ((1, 300, 1), {WRITES: 600, CITES: 1}),
}


def problem(sizes, counts, dtype=torch.float64):
    """Features by kind of nodes, and edges by kind of edges."""
    generator = torch.Generator().manual_seed(1)
    num_nodes = dict(zip(COLUMNS, sizes, strict=True))
    x = {kind: torch.randn(size, COLUMNS[kind], generator=generator).to(dtype) for kind, size in num_nodes.items()}
    edges = {
        kind: torch.stack([torch.randint(max(1, num_nodes[end]), (count,), generator=generator) for end in kind[::2]])
        for kind, count in counts.items()
    }
    return x, edges


def pair(relations=tuple(ALL), dtype=torch.float64, columns=COLUMNS, heads=2, **options):
    """PyG's layer and ours, made of the same seed; with numbers in `p_rel` and `skip` that are not 1."""
    layers = []
    for layer, more in ((pyg.HGTConv, {}), (fused3s.nn.HGTConv, options)):
        torch.manual_seed(0)
        layers.append(layer(columns, 8, (list(COLUMNS), list(relations)), heads, **more).to(dtype))
    theirs, ours = layers
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if columns is COLUMNS:
        assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    with torch.no_grad():
        for each in (*theirs.p_rel.values(), *theirs.skip.values()):
            each.copy_(torch.randn_like(each) + 1)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def results(layer, x, edges):
    """Outputs, and gradients of x and all parameters, by name."""
    layer.zero_grad()
    leaves = {kind: each.clone().requires_grad_() for kind, each in x.items()}
    out = layer(leaves, edges)
    sum(each.square().sum() for each in out.values()).backward()
    found = {f"out of {kind}": each for kind, each in out.items()}
    found |= {f"gradient of {kind}": each.grad for kind, each in leaves.items()}
    return found | {name: each.grad for name, each in layer.named_parameters()}


def assert_same(found, expected, **tolerances):
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        if right is None or found[name] is None:  # of a kind without any edges PyG's may be zeros
            assert found[name] is None, name
            assert right is None or not right.any(), name
        else:
            torch.testing.assert_close(found[name], right, **tolerances, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["auto", "reference", "formula"])
@pytest.mark.parametrize("case", CASES)
def test_a_training_step_is_that_of_pyg(case, backend):
    theirs, ours = pair(backend=backend)
    given = problem(*CASES[case])
    assert_same(results(ours, *given), results(theirs, *given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_training_step_in_float32_is_that_of_pyg(heads):
    theirs, ours = pair(dtype=torch.float32, heads=heads)
    given = problem(*CASES["several kinds"], torch.float32)
    assert_same(results(ours, *given), results(theirs, *given), rtol=1e-4, atol=1e-5)


def test_targets_are_those_of_the_metadata():
    """The layer of one relation returns the kind at its end alone."""
    theirs, ours = pair([WRITES])
    x, edges = problem((9, 7, 3), {WRITES: 30})
    assert list(ours(x, edges)) == ["paper"]
    assert_same(results(ours, x, edges), results(theirs, x, edges), rtol=1e-9, atol=1e-9)


def test_relations_may_come_in_any_order():
    """PyG's layer takes the weights of other relations there."""
    theirs, ours = pair()
    x, edges = problem(*CASES["several kinds"])
    turned = dict(reversed(edges.items()))
    assert_same(results(ours, x, turned), results(theirs, x, edges), rtol=1e-9, atol=1e-9)


def test_the_first_call_sets_the_columns():
    theirs, ours = pair(dtype=torch.float32, columns=-1)
    given = problem(*CASES["several kinds"], torch.float32)
    for layer in (theirs, ours):
        torch.manual_seed(1)
        layer(*given)
    assert_same(results(ours, *given), results(theirs, *given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["csr", "coo", "EdgeIndex", "int32"])
def test_other_graphs(kind):
    theirs, ours = pair()
    x, edges = problem(*CASES["several kinds"])
    source, target = edges[CITES].unique(dim=1)
    edges[CITES] = torch.stack([source, target])
    expected = results(theirs, x, edges)
    sparse = torch.sparse_coo_tensor(edges[CITES].flip(0), torch.ones(len(source)), (37, 37))
    given = {
        "csr": sparse.to_sparse_csr,
        "coo": lambda: sparse,
        "EdgeIndex": lambda: EdgeIndex(edges[CITES], sparse_size=(37, 37)).sort_by("col").values,
        "int32": edges[CITES].int,
    }[kind]()
    assert_same(results(ours, x, edges | {CITES: given}), expected, rtol=1e-9, atol=1e-9)


def test_one_plan_for_all_layers_until_a_tensor_changes(planned):
    theirs, ours = pair()
    other = copy.deepcopy(ours)
    x, edges = problem(*CASES["several kinds"])
    for _ in range(3):
        results(ours, x, edges), results(other, x, dict(edges))
        with torch.no_grad():
            ours(x, edges)
    assert len(planned) == 1
    edges[HAS].copy_(edges[HAS].roll(1, 1).flip(1)).clamp_(max=4)
    assert_same(results(ours, x, edges), results(theirs, x, edges), rtol=1e-9, atol=1e-9)
    assert len(planned) == 2
    x["author"] = torch.cat([x["author"], x["author"][:1]])  # of the same edges: other nodes are moved
    assert_same(results(ours, x, edges), results(theirs, x, edges), rtol=1e-9, atol=1e-9)
    assert len(planned) == 3
    for _ in range(3):
        ours(x, edges | {IN: edges[IN].clone()})
    assert len(planned) == 6
    assert len(merged_edges._merged._entries[id(edges[WRITES])].results) == 1, "the last of the replaced graphs"


def test_nothing_is_kept_without_a_cache_or_for_tensors_of_inference_mode(planned):
    x, edges = problem(*CASES["several kinds"])
    ours = pair(cache=False)[1]
    for _ in range(2):
        ours(x, edges)
    assert len(planned) == 2
    with torch.inference_mode():
        edges[IN] = edges[IN].clone()
    theirs, ours = pair()
    for _ in range(2):
        torch.testing.assert_close(ours(x, edges), theirs(x, edges))
    assert len(planned) == 4
    assert id(edges[WRITES]) not in merged_edges._merged._entries


def test_the_merged_edges_are_freed_with_their_graph():
    ours = pair()[1]
    x, edges = problem(*CASES["several kinds"])
    ours(x, edges)
    (result,) = merged_edges._merged._entries[id(edges[WRITES])].results.values()
    merged = weakref.ref(result.value[1])
    del result, edges
    gc.collect()
    assert merged() is None


def test_under_autocast():
    theirs, ours = pair(dtype=torch.float32)
    x, edges = problem(*CASES["several kinds"], torch.float32)
    expected = theirs(x, edges)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x, edges)
        types = {kind: each.dtype for kind, each in theirs(x, edges).items()}
    for kind, right in expected.items():
        assert found[kind].dtype == types[kind]
        assert (found[kind] - right).norm() <= 2e-2 * right.norm()


@pytest.mark.usefixtures("compiles_eagerly")
def test_compiled_in_one_graph():
    theirs, ours = pair()
    compiled = torch.compile(ours, fullgraph=True)
    for case in ("several kinds", "one relation of many", "empty relation"):
        given = problem(*CASES[case])
        assert_same(results(compiled, *given), _compiled_names(results(theirs, *given)), rtol=1e-9, atol=1e-9)


def _compiled_names(found):
    return {name if " of " in name else f"_orig_mod.{name}": each for name, each in found.items()}


def test_exported_pickled_and_on_device_meta():
    ours = pair()[1]
    given = problem(*CASES["several kinds"])
    expected = ours(*given)
    file = io.BytesIO()
    torch.save(ours, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for layer in (torch.export.export(ours, given).module(), loaded, copy.deepcopy(ours)):
        for kind, right in layer(*given).items():
            torch.testing.assert_close(right, expected[kind])
    shapes = ours.to("meta")(*({kind: each.to("meta") for kind, each in group.items()} for group in given))
    assert {kind: each.shape for kind, each in shapes.items()} == {kind: each.shape for kind, each in expected.items()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, edges: edges[WRITES][0].fill_(9), r"'writes', 'paper'\)\]: edge_index: row 0 .* 9 .* 0 to 8 are"),
        (lambda x, edges: edges[HAS][1].fill_(-1), r"'has', 'author'\)\]: edge_index: row 1 \(targets\) .* -1"),
        (lambda x, edges: edges.update({IN: edges[IN][:1]}), r"'in', 'venue'\)\]: edge_index: got shape \(1, 30\)"),
        (
            lambda x, edges: edges.update({("a", "to", "b"): edges[IN]}),
            r"got \('a', 'to', 'b'\); the metadata have .*w",
        ),
        (lambda x, edges: x.pop("venue"), r"x_dict: got paper, author; edges \('paper', 'in', 'venue'\) need"),
        (lambda x, edges: edges.clear(), "edge_index_dict: got no kind of edges"),
        (lambda x, edges: x.update(venue=None), r"x_dict\['venue'\]: got NoneType; a tensor \[N, F\] is needed"),
        (lambda x, edges: x.update(venue=x["venue"][0]), r"x_dict\['venue'\]: got \(4,\); a tensor \[N, F\] is needed"),
    ],
)
def test_wrong_graphs_get_a_sentence(change, text):
    ours = pair()[1]
    x, edges = problem(*CASES["several kinds"])
    change(x, edges)
    with pytest.raises((TypeError, ValueError), match=text):
        ours(x, edges)


@pytest.mark.parametrize(("columns", "heads", "text"), [(8, 0, "heads: got 0"), (0, 1, "out_channels: got 0")])
def test_wrong_sizes_get_a_sentence(columns, heads, text):
    with pytest.raises(ValueError, match=text):
        fused3s.nn.HGTConv(8, columns, (["paper"], [CITES]), heads)


@pytest.mark.parametrize(("row", "wrong"), [(0, 9), (0, -1), (1, 37), (1, -3)])
def test_an_id_out_of_range_never_reads_another_kind(row, wrong, monkeypatch):
    """On a GPU the merge does not wait for the ids: the plan finds them."""
    monkeypatch.setattr(merged_edges, "check_ids", lambda edges: None)
    x, edges = problem(*CASES["several kinds"])
    edges[WRITES][row, 7] = wrong
    with pytest.raises(ValueError, match=f"edge_index: row {row} .* holds ids from -1"):
        pair()[1](x, edges)


def test_hooks_and_replaced_relations_get_a_sentence():
    ours = pair()[1]
    handle = ours.k_rel.register_forward_hook(lambda *given: None)
    with pytest.raises(NotImplementedError, match="k_rel: it was replaced or has hooks"):
        ours(*problem(*CASES["several kinds"]))
    handle.remove()
    ours.v_rel = nn.Identity()
    with pytest.raises(NotImplementedError, match="v_rel: it was replaced or has hooks"):
        ours(*problem(*CASES["several kinds"]))
    with pytest.raises(TypeError, match=r"Changed\.message: never called"):
        type("Changed", (fused3s.nn.HGTConv,), {"message": lambda self, k_j: k_j})
    assert issubclass(type("Named", (fused3s.nn.HGTConv,), {}), pyg.HGTConv)
    with pytest.raises(NotImplementedError, match="HGTConv makes no messages"):
        ours.register_message_forward_hook(lambda *given: None)


def test_without_pyg_a_layer_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(hgt_conv, "HAS_PYG", False)
    with pytest.raises(ModuleNotFoundError, match="pip install torch_geometric"):
        fused3s.nn.HGTConv(8, 8, (["paper"], [CITES]))
