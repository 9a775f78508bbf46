"""Partitions on disk against the matrix that they were made of."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from full_disk import full_after

from parallel import GraphSource, PartitionError, load_part, load_partition, partition_graph, source_from_csr
from parallel import source as source_module
from parallel.part import hash_of_description, hash_of_file


def _random(num_nodes: int, density: float) -> sp.csr_array:
    return sp.csr_array(np.random.default_rng(num_nodes).random((num_nodes, num_nodes)) < density)


def _clusters() -> sp.csr_array:
    """Three dense clusters with one edge between two of them, rows shuffled."""
    mask = np.kron(np.eye(3, dtype=bool), np.ones((20, 20), bool))
    mask[0, 59] = True
    order = np.random.default_rng(0).permutation(60)
    return sp.csr_array(mask[order][:, order])


MATRICES = {
    "no_rows": lambda: sp.csr_array((0, 0)),
    "one_row": lambda: sp.csr_array(np.ones((1, 1))),
    "no_edges": lambda: sp.csr_array((40, 40)),
    "random": lambda: _random(70, 0.1),
    "clusters": _clusters,
    "hub": lambda: sp.csr_array(np.vstack([np.ones((1, 50)), np.eye(50)[1:]])),
}


def source_of(matrix: sp.csr_array) -> GraphSource:
    """With every edge twice, features that name their row, and splits."""
    rows = np.arange(matrix.shape[0])
    indptr = 2 * matrix.indptr.astype(np.int64)
    indices = (
        np.concatenate([np.r_[row, row] for row in np.split(matrix.indices, matrix.indptr[1:-1])]) if rows.size else []
    )
    data = {
        "node_data": {"feat": rows[:, None] + np.array([0.0, 0.5])},
        "row_ids": {"train": rows[::3], "test": rows[::-2]},
    }
    return source_from_csr(indptr, np.asarray(indices, np.int32), **data, about={"name": "a graph"})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("method", ["contiguous", "metis"])
@pytest.mark.parametrize("name", MATRICES)
def test_parts_are_the_matrix(tmp_path, monkeypatch, name, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    monkeypatch.setattr(source_module, "CHUNK_EDGES", 37)
    matrix = MATRICES[name]()
    partition = partition_graph(source_of(matrix), tmp_path, 3, method, edges_per_block=20)
    parts = [load_part(tmp_path, rank=rank) for rank in range(3)]
    assert not (tmp_path / "unfinished").exists()
    assert (partition.num_nodes, partition.num_edges, partition.about) == (
        matrix.shape[0],
        matrix.nnz,
        {"name": "a graph"},
    )
    in_order = np.concatenate([part.rows for part in parts])
    assert sorted(in_order) == list(range(matrix.shape[0]))
    permuted = matrix.toarray()[in_order][:, in_order] != 0
    for part in parts:
        first, num_rows = partition.offsets[part.rank], part.num_rows
        columns = np.concatenate([first + np.arange(num_rows), part.halo])
        rebuilt = np.zeros((num_rows, matrix.shape[0]), bool)
        for row in range(num_rows):
            of_row = part.indices[part.indptr[row] : part.indptr[row + 1]]
            assert (np.diff(of_row) > 0).all()  # own columns first
            assert (of_row.max(initial=-1) >= num_rows) == (row >= part.num_interior)
            rebuilt[row, columns[of_row]] = True
        assert (rebuilt == permuted[first : first + num_rows]).all()
        needed = np.flatnonzero(rebuilt.any(0))
        assert (part.halo == needed[(needed < first) | (needed >= first + num_rows)]).all()
        assert (part.node_data["feat"] == part.rows[:, None] + np.array([0.0, 0.5])).all()
        assert set(part.rows[part.row_ids["train"]]) == set(part.rows[part.rows % 3 == 0])
        starts = np.concatenate([[0], np.cumsum(part.send_counts)])
        for other in parts:  # what it sends is what the others wait for
            sent = first + part.send_rows[starts[other.rank] : starts[other.rank + 1]]
            assert (sent == other.halo[(other.halo >= first) & (other.halo < first + num_rows)]).all()
    if method == "contiguous":
        assert all(set(part.rows) == set(range(*partition.offsets[part.rank : part.rank + 2])) for part in parts)


def test_metis_finds_clusters_and_balances_rows(tmp_path):
    pytest.importorskip("pymetis")
    partition = partition_graph(source_of(_clusters()), tmp_path, 3, "metis")
    assert partition.rows == [20, 20, 20]
    assert sum(map(sum, partition.halo)) == 1


def test_metis_gives_the_same_parts_on_every_run(tmp_path):
    pytest.importorskip("pymetis")
    for name in ("first", "second"):
        partition_graph(source_of(_random(200, 0.05)), tmp_path / name, 4, "metis")
    assert files(tmp_path / "first") == files(tmp_path / "second")


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_stopped_run_continues_also_with_other_blocks(tmp_path, steps):
    source, whole, stopped = source_of(_random(70, 0.1)), tmp_path / "whole", tmp_path / "stopped"
    partition_graph(source, whole, 3, "contiguous", edges_per_block=10**6)
    said = []

    def stop(text: str) -> None:
        said.append(text)
        if len(said) == steps:
            raise KeyboardInterrupt

    if steps <= 10:
        with pytest.raises(KeyboardInterrupt):
            partition_graph(source, stopped, 3, "contiguous", edges_per_block=30, say=stop)
        with pytest.raises(PartitionError, match="no finished partition"):
            load_partition(stopped)
        with pytest.raises(PartitionError, match="num_parts = 3, and 2 is asked for"):
            partition_graph(source, stopped, 2, "contiguous")
    partition_graph(source, stopped, 3, "contiguous", edges_per_block=70)
    assert files(stopped) == files(whole)


def test_a_finished_partition_is_not_made_again(tmp_path):
    source = source_of(_random(40, 0.1))
    made = partition_graph(source, tmp_path, 2, "contiguous")
    before = files(tmp_path)
    unread = replace(source, edges=lambda: pytest.fail("read again"))
    assert partition_graph(unread, tmp_path, 2, "contiguous") == made
    assert files(tmp_path) == before


def test_one_process_at_a_time_writes(tmp_path):
    source = source_of(_random(40, 0.1))

    def again(text: str) -> None:
        with pytest.raises(OSError, match=f"process {os.getpid()} of .* writes there"):
            partition_graph(source, tmp_path, 2, "contiguous")

    partition_graph(source, tmp_path, 2, "contiguous", say=again)


@pytest.mark.parametrize("largest", [200, 300, 700, 1500])  # bytes of a file; a part's features have 3 kB
def test_a_full_disk_is_a_sentence_and_the_run_continues(tmp_path, largest):
    matrix = _random(70, 0.1)
    source = source_of(matrix)
    source.node_data["feat"] = np.random.default_rng(0).random((70, 12))
    partition_graph(source, tmp_path / "whole", 3, "contiguous")
    with full_after(largest), pytest.raises(OSError, match=r"cannot be written.*File too large"):
        partition_graph(source, tmp_path / "full", 3, "contiguous")
    partition_graph(source, tmp_path / "full", 3, "contiguous")
    assert files(tmp_path / "full") == files(tmp_path / "whole")


@pytest.fixture
def parted(tmp_path):
    partition_graph(source_of(_random(70, 0.1)), tmp_path / "parts", 2, "contiguous")
    return tmp_path / "parts"


DAMAGES = {
    "no finished partition": lambda folder: (folder / "partition.json").unlink(),
    "partition.json: cannot be read": lambda folder: (folder / "partition.json").write_text("[" * 10**5),
    "no partition of version": lambda folder: (folder / "partition.json").write_text('{"version": 0}'),
    "indices.npy: missing": lambda folder: (folder / "part_0001" / "indices.npy").unlink(),
    "part_0001/.*: missing": lambda folder: shutil.rmtree(folder / "part_0001"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_missing_and_damaged_files_are_named(parted, message):
    DAMAGES[message](parted)
    with pytest.raises(PartitionError, match=message):
        load_part(parted, rank=1)


def test_one_changed_byte_of_any_file_is_named(parted):
    where = parted / "part_0001"
    assert len(list(where.iterdir())) == 8
    for file in where.iterdir():
        content = file.read_bytes()
        for place in (3, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(PartitionError, match=f"{file.name}: cannot be read .it was changed"):
                load_part(parted, rank=1)
        file.write_bytes(content)
    load_part(parted, rank=1)


def test_a_changed_description_is_refused(parted):
    path = parted / "partition.json"
    content = json.loads(path.read_text())
    for key, value in content.items():
        for other in (None, [value], {}):
            path.write_text(json.dumps(content | {key: other}))
            with pytest.raises(PartitionError, match=r"was changed since it was written|no partition of version"):
                load_partition(parted)


OUT_OF_RANGE = [
    ("indices", -1, 10**6),
    ("indices", 0, -1),
    ("indptr", 1, 10**6),
    ("indptr", 0, 1),
    ("halo", 0, -1),
    ("halo", -1, 10**6),
    ("rows", 0, -5),
    ("send_rows", 0, 10**6),
    ("ids_train", 0, 10**6),
]


@pytest.mark.parametrize(("name", "place", "value"), OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused_in_files_with_right_hashes(parted, name, place, value):
    file, path = parted / "part_0001" / f"{name}.npy", parted / "partition.json"
    array = np.load(file)
    array[place] = value
    np.save(file, array)
    content = json.loads(path.read_text())
    content["files"][1][file.name] = hash_of_file(file)
    path.write_text(json.dumps(content | {"sha256": hash_of_description(content)}))
    with pytest.raises(PartitionError, match=f"{name.removeprefix('ids_')} does not fit partition.json"):
        load_part(parted, rank=1)


def test_another_graph_method_data_or_number_of_ranks_is_refused(parted):
    source = source_of(_random(70, 0.1))
    with pytest.raises(PartitionError, match="fingerprint"):
        partition_graph(source_of(_random(71, 0.1)), parted, 2, "contiguous")
    with pytest.raises(PartitionError, match="method = 'contiguous', and 'metis'"):
        partition_graph(source, parted, 2, "metis")
    other = replace(source, node_data={"feat": source.node_data["feat"] + 1})
    with pytest.raises(PartitionError, match="data = "):
        partition_graph(other, parted, 2, "contiguous")
    with pytest.raises(KeyboardInterrupt):
        partition_graph(source, parted.with_name("unfinished"), 2, "contiguous", say=_interrupt)
    with pytest.raises(PartitionError, match="data = "):
        partition_graph(other, parted.with_name("unfinished"), 2, "contiguous")
    (parted / "partition.json").unlink()
    with pytest.raises(PartitionError, match="part_0000: is of another partition"):
        partition_graph(source, parted, 2, "contiguous")


@pytest.mark.parametrize("ids", [[3, 70], [-1], [1.5]])
def test_row_ids_that_are_no_nodes_are_refused(tmp_path, ids):
    source = replace(source_of(_random(70, 0.1)), row_ids={"valid": np.array(ids)})
    with pytest.raises(ValueError, match=r"row ids 'valid': got .*; integers from 0 to 69"):
        partition_graph(source, tmp_path, 2, "contiguous")


def _interrupt(text: str) -> None:
    raise KeyboardInterrupt
