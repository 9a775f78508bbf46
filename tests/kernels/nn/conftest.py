import pytest

from fused3s import plan_attention
from fused3s.nn.cached import planned_edges


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Layers of these sizes are faster by one."""


@pytest.fixture
def planned(monkeypatch):
    """Options of each call of plan_attention through the layers of PyG's kind."""
    calls = []

    def recorded(*arguments, **options):
        calls.append(options)
        return plan_attention(*arguments, **options)

    monkeypatch.setattr(planned_edges, "plan_attention", recorded)
    return calls
