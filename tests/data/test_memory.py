"""Available memory: the system's, or what is left of a container's limit."""

import pytest

from data import memory

GIB = 2**30


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """Sets the files of a control group; None leaves one out."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_of_system", lambda: 20 * GIB)

    def write(limit, used, stat="anon 5\ninactive_file 0\nactive_file 7\n"):
        for name, content in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
            if content is not None:
                (tmp_path / name).write_text(f"{content}\n")

    return write


def test_a_limit_counts_if_it_leaves_less_than_the_system(limits):
    limits(8 * GIB, 3 * GIB)
    assert memory.available_bytes() == 5 * GIB
    limits(80 * GIB, 3 * GIB)
    assert memory.available_bytes() == 20 * GIB


def test_pages_of_files_are_given_back(limits):
    limits(8 * GIB, 7 * GIB, f"anon 1\ninactive_file {4 * GIB}\n")
    assert memory.available_bytes() == 5 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [("max", GIB, ""), (None, None, None), ("damaged", GIB, ""), (8 * GIB, None, ""), (8 * GIB, GIB, None)],
)
def test_without_a_limit_the_system_counts(limits, limit, used, stat):
    limits(limit, used, stat)
    assert memory.available_bytes() == 20 * GIB


def test_a_group_that_is_over_its_limit_has_none_left(limits):
    limits(GIB, 2 * GIB)
    assert memory.available_bytes() == 0
    assert not memory.fits(1)
    with pytest.raises(MemoryError, match=r"a graph: about 0\.5 GiB needed, 0\.0 GiB available"):
        memory.require_memory("a graph", GIB // 2)


def test_a_system_that_reports_nothing_refuses_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_of_system", lambda: None)
    assert memory.available_bytes() is None
    assert memory.fits(2**70)
    memory.require_memory("a graph", 2**70)
