"""Score terms: expressions, their derivatives, and what is wrong with an argument."""

import pytest
import torch
from formula_backend import FormulaBackend

from baselines import REGISTRY
from fused3s import EdgeData, ScoreTerm, plan_attention, sparse_attention
from fused3s.terms.score_expression import FUNCTIONS, evaluate
from fused3s.terms.score_source import expression_source

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
        ("s + 1e39", "allowed"),
    ],
)
def test_what_is_no_expression(expression, text):
    with pytest.raises(ValueError, match="expression") as error:
        ScoreTerm(expression)
    assert text in str(error.value)


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
