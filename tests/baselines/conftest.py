import pytest
from attention_cases import EDGE_CASES, Csr


@pytest.fixture(params=EDGE_CASES)
def edge_case(request: pytest.FixtureRequest) -> Csr:
    return EDGE_CASES[request.param]()
