"""Score terms: expressions, their derivatives, and what is wrong with an argument."""

import ctypes
import math
import random
import re
import subprocess
import sys
from functools import reduce
from itertools import product

import pytest
import torch
from formula_backend import FormulaBackend
from torch.nn.functional import leaky_relu

from bench.baselines import REGISTRY
from fused3s import EdgeData, ScoreTerm, plan_attention, sparse_attention
from fused3s.runtime.source import CUDA_FOLDER, read_source
from fused3s.terms import score_term
from fused3s.terms.score_expression import FUNCTIONS, evaluate, parse
from fused3s.terms.score_source import count_values, expression_source, uses_score
from tests.cuda_shim.cuda_on_cpu import COMPILER, NEEDS_COMPILER

EXPRESSIONS = [
    ("s * w + 2", lambda s, w: s * w + 2),
    ("-s / (w**2 + 1)", lambda s, w: -s / (w**2 + 1)),
    ("exp(-s**2) + log(abs(w) + 1)", lambda s, w: torch.exp(-(s**2)) + torch.log(w.abs() + 1)),
    ("sqrt(abs(s)) + sin(w) * cos(s)", lambda s, w: s.abs().sqrt() + w.sin() * s.cos()),
    ("sigmoid(s) - tanh(w)", lambda s, w: s.sigmoid() - w.tanh()),
    ("relu(s) + leaky_relu(w, 0.2)", lambda s, w: s.relu() + torch.nn.functional.leaky_relu(w, 0.2)),
    ("min(s, w) + max(s, 2 * w)", lambda s, w: torch.minimum(s, w) + torch.maximum(s, 2 * w)),
    ("clamp(s, -0.5, w)", lambda s, w: torch.where(s < -0.5, -0.5, torch.where(s > w, w, s))),
    ("where(s <= w, s, 3)", lambda s, w: torch.where(s <= w, s, torch.tensor(3.0).to(s))),
]


@pytest.mark.parametrize(("expression", "formula"), EXPRESSIONS)
def test_expressions_in_torch(expression, formula):
    s, w = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(evaluate(expression, {"s": s, "w": w}), formula(s, w))


def test_every_function_is_tried():
    assert all(any(f"{name}(" in text for text, _ in EXPRESSIONS) for name in FUNCTIONS)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("s +", "cannot be read"),
        ("s; s", "cannot be read"),
        ("open('x')", "has \"open('x')\"; numbers, s"),
        ("s.real", "has 's.real'"),
        ("s if s else 1", "allowed"),
        ("s < 1", "has 's < 1'"),
        ("where(s, 1, 2)", "one comparison is needed"),
        ("where(0 < s < 1, 1, 2)", "one comparison is needed"),
        ("exp(s, s)", "gives exp 2 arguments; it takes 1"),
        ("exp", "without arguments"),
        ("s + b", "names 'b'"),
        ("s + 'b'", "allowed"),
        ("s + True", "allowed"),
        ("s + 1e39", "has the number 1e39; up to 3.4e+38"),
        ("s" + " + s" * 9_000, "has 36001 characters, up to 30000"),
        ("s + '\udc80'", "cannot be read"),
        ("s\0", "cannot be read"),
        ("s**" + "9" * 5000, "9999"),
        ("s**0x" + "9" * 5000, "0x9999"),
        ("[" * 150 + "]" * 150, "[[["),
        ("9**9**9", "9.0 ** 387420489.0"),
        ("s * 16777215**16777215", "16777215.0 ** 16777215.0"),
        ("10**30**30 * s", "30.0 ** 30.0"),
        ("log(-1) + s", "log(-1.0)"),
        ("s * exp(1000)", "exp(1000.0)"),
        ("s * 1e30 * 1e30 + 1e38 * 10", "1e+38 * 10.0"),
        ("(-8)**(1 / 3) * s", "-8.0 ** 0.33"),
        ("0**s", "log(0.0)"),  # of the derivative
        (
            "+".join(f"max({'+'.join(f'sin(s * {i}.{j})' for j in range(40))}, s)" for i in range(40)),
            "more than 4096 operations",
        ),
    ],
)
def test_what_is_no_expression(expression, text):
    with pytest.raises(ValueError, match="expression") as error:
        ScoreTerm(expression)
    assert text in str(error.value)


def test_the_depth_is_bounded_whatever_python_allows():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        for deep in ("exp(" * 100 + "s" + ")" * 100, "-" * 500 + "s", "+".join("s" * 101)):
            with pytest.raises(ValueError, match="nested too deeply"):
                ScoreTerm(deep)
    finally:
        sys.setrecursionlimit(limit)
    term, q = ScoreTerm("tanh(" * 97 + "-s * 2" + ")" * 97), torch.ones(2, 1, 4)
    edges = EdgeData(score=term, multiplier=torch.ones(2), bias=torch.zeros(2), clamp=3.0)
    output = sparse_attention(q, q, q, torch.tensor([[0, 1], [1, 1]]), shape=(2, 2), edges=edges)
    torch.testing.assert_close(output[1], q[1])


def test_values_that_do_not_fit():
    graph = torch.tensor([[0, 1, 2], [1, 2, 0]])
    plan = plan_attention(graph, shape=(3, 3), device="cpu", backend="reference", edge_data=True)
    q = torch.randn(3, 2, 4)

    def call(term: ScoreTerm) -> torch.Tensor:
        return plan(q, q, q, edges=EdgeData(score=term))

    assert call(ScoreTerm("s + b", row={"b": torch.zeros(3)})).shape == q.shape
    for term, text in (
        (lambda: ScoreTerm("s + b", b=torch.zeros(3)), "b: got"),
        (lambda: ScoreTerm("s", b=1.0), "b: given, but 's' does not name it"),
        (lambda: ScoreTerm("s + b", row={"b": torch.zeros(3)}, b=1.0), "b: given twice"),
        (lambda: ScoreTerm("s + s", s=1.0), "s: the score and functions have this name"),
        (lambda: ScoreTerm("s + b", row={"b": torch.zeros(4)}), r"b: got shape \(4,\); \[num_rows\]"),
        (lambda: ScoreTerm("s + b", col={"b": torch.zeros(3, 3)}), "3 heads"),
        (lambda: ScoreTerm("s + b", edge={"b": torch.zeros(3, dtype=torch.float16)}), "torch.float16"),
        (lambda: ScoreTerm("s + b", head={"b": torch.zeros(3)}), "3 heads"),
        (lambda: ScoreTerm("s + b", row={"b": torch.zeros(3, dtype=torch.int64)}), "floating-point"),
        (lambda: ScoreTerm("s + b", row={"b": [1.0, 2.0, 3.0]}), "a torch.Tensor is needed"),
        (lambda: ScoreTerm("s * b", b=float("nan")), "finite"),
        (lambda: "s + 1", "a ScoreTerm is needed"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            call(term())
    with pytest.raises(ValueError, match="b: has a NaN"):
        plan.bind_edges(EdgeData(score=ScoreTerm("s + b", row={"b": torch.tensor([0.0, float("nan"), 0.0])})))


def test_a_value_alone_has_a_gradient_without_a_plan(monkeypatch):
    """sparse_attention plans a backward pass where only a term's value requires a gradient."""
    monkeypatch.setitem(REGISTRY, "formula", FormulaBackend())  # with a backward pass of its own
    graph, q, weight = torch.tensor([[0, 1, 2], [1, 1, 1]]), torch.randn(3, 2, 4), torch.randn(3, requires_grad=True)
    edges = EdgeData(score=ScoreTerm("s + w", col={"w": weight}))
    gradients = []
    for backend in ("reference", "formula"):
        output = sparse_attention(q, q, q, graph, shape=(3, 3), backend=backend, edges=edges)
        gradients += torch.autograd.grad(output[:, :, 0].sum(), weight)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_sources_hold_no_more_than_the_expression():
    """The text that is compiled names nothing that a caller wrote."""
    term = ScoreTerm("s + evil", col={"evil": torch.zeros(3)})
    assert "evil" not in expression_source(term.text)
    assert "x.column[0]" in expression_source(term.text)


def test_many_literals_warn_once_and_caches_let_go():
    caches = (parse, count_values, uses_score, expression_source, read_source)
    caches += (score_term._normalised, score_term._substituted, score_term._texts_of)

    def make_terms() -> None:
        for i in range(1, 300):
            text = ScoreTerm(f"s / {i / 10}").text
            read_source("features/pack_features.cu", text), count_values(text), uses_score(text)
            score_term._substituted(text, f"s * edge{i}"), score_term._texts_of(f"{text} of a form")
            ScoreTerm("s / c", c=i)

    with pytest.warns(UserWarning, match=r"32 expressions differ from 's / 3\.2' in literals .*slope=0\.2") as warned:
        make_terms()
    (warning,) = warned
    assert warning.filename == __file__
    for cache in caches:
        assert cache.cache_info().currsize <= cache.cache_info().maxsize < 300, cache


def test_minus_zero_is_zero():
    """Scalars of a launch are cached by their values, which are equal."""
    graph, q = torch.tensor([[0, 1], [1, 1]]), torch.ones(2, 1, 4)
    plan = plan_attention(graph, shape=(2, 2), device="cpu", backend="reference", edge_data=True)
    term = ScoreTerm("where(1 / z > 0, s, 9 * s * w)", col={"w": torch.tensor([0.0, 1.0])}, z=-0.0)
    assert math.copysign(1, term.numbers["z"]) == 1
    equal = plan(q, q, q * torch.tensor([0.0, 1.0])[:, None, None], edges=EdgeData(score=term))
    torch.testing.assert_close(equal[1], torch.full((1, 4), 0.5))


def on_tensors(function):
    return lambda *given: function(*(x if isinstance(x, torch.Tensor) else torch.tensor(float(x)) for x in given))


# The functions with a kink, as torch has them.
KINKS = {name: on_tensors(getattr(torch, name)) for name in ("relu", "abs", "clamp", "where")}
KINKS |= {"min": on_tensors(torch.minimum), "max": on_tensors(torch.maximum), "leaky_relu": leaky_relu}
OF_ONE = ("{x}", "2 * {x} - 1", "relu({x})", "abs({x})", "leaky_relu({x}, 0.5)", "leaky_relu({x}, 0)", "min({x}, 1)")
OF_ONE += ("max(-1, {x})", "clamp({x}, -1, 1)", "where({x} < 1, {x}, 2)", "where({x} >= 0, {x}, -{x})")
OF_TWO = ("{x} + {y}", "{x} - {y}", "{x} * {y}", "min({x}, {y})", "max({x}, {y})", "where({x} <= {y}, {y}, 3 * {x})")
OF_TWO += ("where(0 > {x}, {x}, {y})", "max({x} - {y}, {y} - {x})")
OF_TWO += ("{x} + {y} + where({x} < 1, 1, 3) / where({y} < 2, 2, 4)",)  # whole numbers, not divided as such
OF_TWO += ("clamp({x}, -1 - abs({y}), 9)", "clamp({x}, -9, abs({y}))")


def drawn_expression(draw: random.Random, names: tuple[str, ...]) -> str:
    """An expression of all names, in which small whole numbers often lie on a kink."""
    if len(names) == 1:
        return f"({draw.choice(OF_ONE).format(x=names[0])})"
    cut = draw.randrange(1, len(names))
    x, y = (drawn_expression(draw, part) for part in (names[:cut], names[cut:]))
    both = draw.choice(OF_TWO).format(x=x, y=y)
    return f"({draw.choice(OF_ONE).format(x=f'({both})')})"


def compiled_on_cpu(expressions: list[str], folder) -> ctypes.CDLL:
    """Functions run_0, run_1, .. of [n, 3] s, row0 and column0 and of the results [n, 4]: the values, and the
    derivatives by the three."""
    text = "#define __device__\n#define __forceinline__ inline\n#include <math.h>\n"
    text += (CUDA_FOLDER / "score/score_functions.cuh").read_text()
    text += "struct Values { float row[1], column[1], edge[1], head[1]; };\n"
    for i, expression in enumerate(expressions):
        text += f"namespace of_{i} {{\n{re.sub('#.*', '', expression_source(expression))}}}\n"
        text += f"""extern "C" void run_{i}(long n, const float* in, float* out) {{
          for (; n--; in += 3, out += 4) {{
            const Values x = {{{{in[1]}}, {{in[2]}}, {{}}, {{}}}};
            Values of = {{}};
            const float numbers[8] = {{}};
            out[0] = of_{i}::ScoreExpression::apply(in[0], x, numbers);
            out[1] = of_{i}::ScoreExpression::gradient(1.0f, in[0], x, numbers, of);
            out[2] = of.row[0], out[3] = of.column[0];
          }}
        }}
        """
    (folder / "expressions.cpp").write_text(text)
    subprocess.run(
        [COMPILER, "-w", "-O1", "-shared", "-fPIC", "expressions.cpp", "-o", "expressions.so"], cwd=folder, check=True
    )
    return ctypes.CDLL(str(folder / "expressions.so"))


@NEEDS_COMPILER
def test_kernels_have_the_values_and_derivatives_of_torch_at_every_kink_and_nan(tmp_path):
    draw, names = random.Random(0), ("s", "row0", "column0")
    expressions = [drawn_expression(draw, names) for _ in range(120)]
    for level in ("abs({} - 1)", "max({}, row0)", "min(max({}, row0), s)", "clamp({} + row0, -1, 1)"):
        expressions.append(reduce(lambda inner, _, level=level: level.format(inner), range(10), "s"))
    assert all(any(f"{name}(" in each for each in expressions) for name in KINKS)
    library = compiled_on_cpu(expressions, tmp_path)
    unused = {"allow_unused": True, "materialize_grads": True}
    points = torch.tensor([*product((-2.0, -1.0, 0.0, 1.0, 2.0, torch.nan), repeat=3)])
    for i, expression in enumerate(expressions):
        found = torch.full((len(points), 4), torch.nan)
        library[f"run_{i}"](ctypes.c_long(len(points)), *(ctypes.c_void_p(x.data_ptr()) for x in (points, found)))
        leaves = [column.clone().requires_grad_() for column in points.T]
        value = eval(expression, {**KINKS, **dict(zip(names, leaves, strict=True))})
        finite = ~points.isnan().any(1)  # others have the gradient NaN: that of their row, times any derivative
        wanted = torch.stack(torch.autograd.grad(value.sum(), leaves, **unused), 1)[finite]
        in_torch = evaluate(expression, dict(zip(names, leaves, strict=True)))
        of_torch = torch.stack(torch.autograd.grad(in_torch.sum(), leaves, **unused), 1)[finite]
        for where, values, gradients in (("C++", found[:, 0], found[finite, 1:]), ("torch", in_torch, of_torch)):
            label = f"{expression} in {where}: ".__add__
            torch.testing.assert_close(values, value, rtol=0, atol=0, equal_nan=True, msg=label)
            torch.testing.assert_close(gradients, wanted, rtol=0, atol=0, msg=label)
