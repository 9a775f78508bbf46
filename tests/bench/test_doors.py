"""The benchmark of groups of users, with its small inputs on the CPU: sides, errors, memory that ends."""

import pytest
import torch
from bench_runs import CPU, config, run
from kernel_rows import row
from torch.nn.functional import linear

import fused3s
from bench import doors
from bench.doors import (
    ANEMOI,
    COMPILED,
    EAGER,
    FLEX,
    FLEX_NEW,
    GROUPS,
    OURS,
    OURS_NEW,
    UNFUSED,
    errors_of,
    message_passing,
)
from report.engine import Data
from report.rows import frame
from report.tables import render

DOUBLE = torch.float64
pytestmark = pytest.mark.usefixtures("one_thread", "compiles_eagerly")


def rows_of(path, *overrides):
    status, rows = run(config("doors", "size=small", "repeats=1", *overrides), path / "doors.csv")
    steps = [one for one in rows if one.region == "step"]
    assert len(rows) - len(steps) == sum(one.status in ("ok", "wrong") for one in steps)  # each has a forward pass
    assert all(one.variant.endswith(" (small)") for one in rows)
    names = [one.variant.removesuffix(" (small)") for one in steps]
    return status, {
        (n, one.dtype, (one.backend, one.launch, one.plan)): one for n, one in zip(names, steps, strict=True)
    }


def test_every_group_has_a_row_of_each_side(tmp_path):
    status, rows = rows_of(tmp_path)
    assert status == 0
    sides = {"mesh": (OURS, UNFUSED, EAGER), "weather": (OURS, EAGER), "driving": (OURS, EAGER)}
    sides = {(name, dtype): sides.get(name, (OURS, OURS_NEW)) for name in GROUPS for dtype in GROUPS[name].dtypes}
    good = {(*case, side) for case, found in sides.items() for side in found}
    good |= {("mesh", "float32", COMPILED), ("weather", "bfloat16", COMPILED), ("driving", "float32", COMPILED)}
    assert {case for case, one in rows.items() if one.status == "ok"} == good
    others = {case: one.status for case, one in rows.items() if case not in good}
    missing = (("relational", FLEX), ("relational", FLEX_NEW), ("weather", ANEMOI))
    assert others == {(name, "bfloat16", side): "unavailable" for name, side in missing}
    assert all(0 < rows[case].relative_error < (1e-5 if case[1] == "float32" else 0.02) for case in good)
    assert rows_of(tmp_path)[1] == {}  # all are known


def test_wrong_outputs_and_gradients_are_wrong(tmp_path, monkeypatch):
    attend = fused3s.edge_attention
    monkeypatch.setattr(fused3s, "edge_attention", lambda *given, **named: 1.01 * attend(*given, **named))
    assert rows_of(tmp_path, "groups=[mesh]")[1]["mesh", "float32", OURS].status == "wrong"

    def backwards(*given, **named):
        out = attend(*given, **named)
        if out.requires_grad:
            out.register_hook(lambda gradient: 1.01 * gradient)
        return out

    monkeypatch.setattr(fused3s, "edge_attention", backwards)
    found = rows_of(tmp_path / "2", "groups=[mesh]")[1]
    assert found["mesh", "float32", OURS].status == "wrong"
    assert found["mesh", "float32", EAGER].status == "ok"


def test_memory_that_ends_is_a_row(tmp_path, monkeypatch):
    def ends(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has ..")

    monkeypatch.setattr(doors, "compiled", ends)
    status, rows = rows_of(tmp_path, "groups=[weather]")
    assert status == 0
    found = {side: one.status for (_, _, side), one in rows.items()}
    assert found == {OURS: "ok", EAGER: "ok", COMPILED: "oom", ANEMOI: "unavailable"}


def test_the_formula_is_dense_attention():
    """With keys and values of edges, a repeated edge, a row without one."""
    q, k, v = torch.randn(3, 6, 2, 4, dtype=DOUBLE)
    ends = torch.randint(5, (2, 20))
    ends[:, 0] = ends[:, 1]
    of_key, of_value = torch.randn(2, 20, 2, 4, dtype=DOUBLE)
    expected = torch.zeros(6, 2, 4, dtype=DOUBLE)
    for target in range(5):
        own = ends[1] == target
        if own.any():
            keys, values = k[ends[0, own]] + of_key[own], v[ends[0, own]] + of_value[own]
            weight = torch.einsum("hd,ehd->eh", q[target] / 2, keys).softmax(0)
            expected[target] = torch.einsum("eh,ehd->hd", weight, values)
    torch.testing.assert_close(message_passing(q, k, v, ends, of_key, of_value), expected)


def test_masks_of_contexts_are_the_definition():
    node, parents, column = doors.relational_masks.contexts(2, 60)
    feature, neighbour, of_column = doors.boolean_masks(node, parents, column)
    for context in range(2):
        for query in range(60):
            for key in range(60):
                own = node[context]
                is_parent = own[key] in parents[context, query]
                assert feature[context, query, key] == (is_parent or own[query] == own[key])
                assert neighbour[context, query, key] == (own[query] in parents[context, key])
                assert of_column[context, query, key] == (column[context, query] == column[context, key])


def test_sizes_of_inputs():
    problem = doors.driving(CPU, torch.float32, scenes=3, agents=4, points=50)
    assert problem.leaves["r"].shape == (problem.edges, 128)
    assert problem.leaves["lanes"].shape == (150, 128)
    assert 0 < problem.edges < 3 * 4 * 50
    weather = doors.weather(CPU, torch.float32, nlat=6, cutoff=0.6)
    assert weather.leaves["q"].shape == (72, 16, 64)
    assert linear(weather.leaves["attr"], weather.leaves["weight"]).shape == (weather.edges, 1024)


def test_the_table_has_a_line_of_each_group():
    line = {"bench": "doors", "region": "step", "scope": "attention", "graphs": 0, "data_sha256": "none", "heads": 4}
    line |= {"dtype": "float32", "out_dtype": "float32", "variant": "mesh", "l2": "none", "data_source": "none"}
    sides = {("auto", "eager"): 2.0, ("pyg", "compiled"): 7.0}
    rows = [
        row("none", backend, value, **line, launch=launch, metric=metric)
        for (backend, launch), value in sides.items()
        for metric in ("time", "peak_memory")
    ]
    text = render(Data(frame(rows)), "doors")
    assert "| mesh, 4 x 64, fp32: PyG | 7.00 | 2.00 | 3.50 | - | 0.01 | 0.00 |" in text
    assert "relational" not in text.partition("| --- |")[2]
    small = [one.model_copy(update={"variant": "mesh (small)", "value": 0.5, "date": "2030"}) for one in rows]
    both = render(Data(frame([*rows, *small])), "doors")
    assert both.partition("| --- |")[2].startswith(text.partition("| --- |")[2])
    assert "| mesh, 4 x 64, fp32: PyG (small) | 0.50 | 0.50 |" in both


@pytest.mark.gpu
def test_every_side_is_right_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()  # the kernels' own limits, and torch.compile
    device = torch.device("cuda", torch.cuda.current_device())
    settings = config("doors", "size=small", "repeats=1")
    status, rows = run(settings, tmp_path / "doors.csv", device=device)
    assert status == 0, [(one.variant, one.backend, one.reason) for one in rows if one.status != "ok"]
    assert {one.metric for one in rows} == {"time", "peak_memory"}
    assert {one.backend for one in rows} == {"auto", "csr_unfused", "pyg", "flex_attention", "anemoi"}


def test_errors_are_those_of_the_side():
    problem = doors.mesh(CPU, torch.float32, nodes=25)
    run = problem.sides[OURS]()
    errors = errors_of(problem, run)
    assert 0 < errors.output < 1e-5
    assert 0 < errors.gradients < 1e-5
    assert errors_of(problem, lambda leaves: 1.5 * run(leaves)).gradients == pytest.approx(0.5, rel=1e-3)
