import gzip
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch

import data

# Not symmetric; node 3 is only ever a key, node 2 has a self loop.
ROW, COL, NODES = np.array([0, 0, 1, 2, 2]), np.array([1, 3, 2, 0, 2]), 4
MATRIX = scipy.sparse.coo_array((np.ones(5), (ROW, COL)), (NODES, NODES))
LINES = [f"{i} {j}" for i, j in zip(ROW, COL, strict=True)]


def load(path: Path, **options) -> data.LoadedGraph:
    return data.load("mine", path=path, **options)


def dense(loaded: data.LoadedGraph) -> np.ndarray:
    size = (loaded.meta.num_nodes,) * 2
    ones = np.ones(loaded.meta.num_edges, int)
    return scipy.sparse.csr_array((ones, loaded.columns.numpy(), loaded.row_pointers.numpy()), size).toarray()


def authors_npz(path: Path, **changed) -> Path:
    np.savez(path, **{"src_li": ROW.astype(np.int32), "dst_li": COL.astype(np.int32), "num_nodes": NODES, **changed})
    return path


def collection_npz(path: Path, **changed) -> Path:
    arrays = {"node_counts": [3, 2, 4], "edge_counts": [2, 1, 3], "u": [0, 1, 0, 0, 1, 3], "v": [1, 2, 1, 1, 2, 3]}
    dtypes = {"node_counts": np.int32, "edge_counts": np.int32, "u": np.uint16, "v": np.uint16}
    np.savez(path, **({key: np.array(value, dtypes[key]) for key, value in arrays.items()} | changed))
    return path


def text(name, content):
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


SPACED, COMMAS = "\n".join(LINES) + "\n", "\n".join(LINES).replace(" ", ",")
FORMATS = {
    "authors.npz": lambda path: authors_npz(path / "authors.npz"),
    **{
        f"{name}.npz": lambda path, name=name: scipy.sparse.save_npz(path / f"{name}.npz", MATRIX.asformat(name))
        for name in ("csr", "csc", "coo", "bsr")
    },
    "general.mtx": lambda path: scipy.io.mmwrite(path / "general.mtx", MATRIX),
    "pattern.mtx": lambda path: scipy.io.mmwrite(path / "pattern.mtx", MATRIX, field="pattern"),
    "snap.txt": text("snap.txt", "# Directed graph\n# FromNodeId\tToNodeId\n" + SPACED.replace(" ", "\t")),
    "spaces.txt": text("spaces.txt", "\n".join(f"  {line}  0.5 # weight" for line in LINES)),
    "snap.txt.gz": text("snap.txt.gz", gzip.compress(("# comment\n" + SPACED).encode())),
    "musae.csv": text("musae.csv", "id_1,id_2\n" + COMMAS),
    "header.tsv": text("header.tsv", "first node\tsecond node\tweight\n" + SPACED.replace(" ", "\t")),
    "spaces.tsv.gz": text("spaces.tsv.gz", gzip.compress(SPACED.encode())),
    "semicolons.csv": text("semicolons.csv", "# decimal comma\n" + COMMAS.replace(",", ";").replace("\n", ";0,5\n")),
    "tabs.csv": text("tabs.csv", COMMAS.replace(",", "\t")),
    "edge.csv.gz": text("edge.csv.gz", gzip.compress(COMMAS.encode())),
    "bom.csv": text("bom.csv", b"\xef\xbb\xbf" + COMMAS.replace("\n", "\r\n").encode()),
}


@pytest.mark.parametrize("file", FORMATS)
def test_every_format_gives_the_same_graph_with_rows_as_queries(tmp_path, file):
    FORMATS[file](tmp_path)
    loaded = load(tmp_path / file)
    assert np.array_equal(dense(loaded), MATRIX.toarray())
    assert loaded.row_pointers.dtype == loaded.columns.dtype == torch.int32
    assert loaded.meta.sha256 == load(authors_npz(tmp_path / "other.npz")).meta.sha256
    assert (loaded.meta.source, loaded.meta.origin, loaded.meta.name) == ("file", str(tmp_path / file), "mine")
    assert (loaded.meta.num_nodes, loaded.meta.num_edges, loaded.meta.num_graphs) == (4, 5, 1)


def test_symmetric_mtx_holds_both_directions(tmp_path):
    (tmp_path / "s.mtx").write_text("%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 3\n")
    assert dense(load(tmp_path / "s.mtx")).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_stored_zeros_are_edges(tmp_path):
    scipy.sparse.save_npz(tmp_path / "z.npz", scipy.sparse.csr_array((np.zeros(5), (ROW, COL)), (NODES, NODES)))
    assert load(tmp_path / "z.npz").meta.num_edges == 5


@pytest.mark.parametrize("ending", ["txt", "csv"])
def test_ids_with_gaps_become_ranks(tmp_path, ending):
    path = tmp_path / f"g.{ending}"
    separator = "," if ending == "csv" else "\t"
    path.write_text("\n".join(separator.join(pair) for pair in (("500", "7"), ("7", "230425980"), ("12", "7"))))
    loaded = load(path)
    assert dense(loaded).tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert loaded.node_data["id"].tolist() == [7, 12, 500, 230425980]


def test_names_as_node_ids_end_in_a_sentence(tmp_path):
    (tmp_path / "n.csv").write_text("from,to\n1,2\nalice,2\n")
    with pytest.raises(ValueError, match=r"n\.csv: .*line 3 is 'alice,2'; two node ids .* integers .*factorize"):
        load(tmp_path / "n.csv")


def test_features_and_labels_of_a_file(tmp_path):
    feat, label = np.arange(12.0).reshape(4, 3), np.array([0, 4, 1, 1], np.int32)
    loaded = load(authors_npz(tmp_path / "f.npz", feat=feat, label=label))
    assert loaded.node_data["feat"].dtype == torch.float32
    assert np.array_equal(loaded.node_data["feat"].numpy(), feat)
    assert loaded.node_data["label"].tolist() == [0, 4, 1, 1]
    assert loaded.node_data["label"].dtype == torch.int64
    meta = loaded.meta
    assert (meta.features, meta.feature_kind, meta.feature_dim, meta.num_classes) == ("original", "float", 3, 5)


def test_collection_is_a_batch_of_its_first_graphs(tmp_path):
    loaded = load(collection_npz(tmp_path / "c.npz"), batch_size=3)
    assert loaded.graph_sizes.tolist() == [3, 2, 4]
    assert loaded.graph.batch_num_edges().tolist() == [4, 2, 5]  # both directions, a self loop once
    assert (loaded.meta.task, loaded.meta.num_graphs) == ("graph", 3)
    edges = {(0, 1), (1, 2), (3, 4), (5, 6), (6, 7), (8, 8)}
    assert set(zip(*np.nonzero(dense(loaded)), strict=True)) == edges | {(j, i) for i, j in edges}
    assert load(tmp_path / "c.npz", batch_size=2).graph_sizes.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("labels", "metric", "outputs", "expected"),
    [
        (np.array([2, -1, 0], np.int8), "accuracy", 3, [[2], [-1], [0]]),
        (np.array([-1, -1, -1]), "accuracy", 2, [[-1], [-1], [-1]]),
        (np.array([[1, -1], [0, 1], [0, 0]]), "rocauc", 2, [[1, np.nan], [0, 1], [0, 0]]),
        (np.array([[1, np.nan], [0, 1], [0, 0.5]]), "mae", 2, [[1, np.nan], [0, 1], [0, 0.5]]),
        (np.array([[1.0], [0], [2]]), "mae", 1, [[1], [0], [2]]),
    ],
)
def test_labels_of_graphs_say_how_they_are_scored(tmp_path, labels, metric, outputs, expected):
    for size in (3, 2):  # the classes are those of the whole file
        loaded = load(collection_npz(tmp_path / "c.npz", graph_label=labels), batch_size=size)
        assert (loaded.metric, loaded.meta.num_classes) == (metric, outputs)
        np.testing.assert_array_equal(loaded.labels, np.array(expected, np.float32)[:size])


@pytest.mark.parametrize("labels", [np.array([[1], [0], [2]]), np.array([[1.0], [0], [np.nan]])])
def test_one_label_does_not_change_how_the_others_are_scored(tmp_path, labels):
    """Integers are answers and floats are targets; what the values contradict is refused."""
    with pytest.raises(ValueError, match="graph_label holds neither answers, integers of 1, 0, and -1"):
        load(collection_npz(tmp_path / "c.npz", graph_label=labels), batch_size=2)


def test_an_unknown_class_of_a_graph_under_a_registered_name(tmp_path):
    path = collection_npz(tmp_path / "c.npz", graph_label=np.array([2, -1, 36]))
    assert data.load("ogbg-ppa", path=path, batch_size=3).labels.tolist() == [[2], [-1], [36]]
    with pytest.raises(ValueError, match="a label of 37; 0 to 36, and -1 for unknown, are allowed"):
        data.load("ogbg-ppa", path=collection_npz(path, graph_label=np.array([2, -1, 37])), batch_size=3)


def test_integers_are_answers_where_the_data_set_asks_a_question(tmp_path):
    path = collection_npz(tmp_path / "c.npz", graph_label=np.array([1, -1, 0]))
    labels = data.load("ogbg-molhiv", path=path, batch_size=3).labels
    np.testing.assert_array_equal(labels, np.array([[1], [np.nan], [0]], np.float32))
    with pytest.raises(ValueError, match="a graph label of 2; 0 and 1, and for unknown NaN, in integers -1"):
        data.load("ogbg-molhiv", path=collection_npz(path, graph_label=np.array([1, -1, 2])), batch_size=3)


def damaged(name, change):
    """A file of FORMATS whose bytes are changed."""

    def make(path):
        FORMATS[name](path)
        whole = (path / name).read_bytes()
        (path / name).write_bytes(change(whole))

    return make


def authors(**changed):
    return lambda path: authors_npz(path / "a.npz", **changed)


def collection(**changed):
    return lambda path: collection_npz(path / "c.npz", **{key: np.array(value) for key, value in changed.items()})


def broken_csr(path):
    csr = MATRIX.tocsr()
    np.savez(path / "m.npz", indptr=csr.indptr, indices=csr.indices + 9, data=csr.data, shape=csr.shape, format=b"csr")


def header(text):
    """An array of the .npy format, version 1, with this header."""
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


def npz_of(member):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("src_li", "dst_li", "num_nodes"):
            archive.writestr(f"{name}.npy", member)
    return buffer.getvalue()


def encrypted(whole):
    """The archive with the flag of encryption at each member."""
    for signature, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        parts = whole.split(signature)
        whole = signature.join([parts[0], *(part[: place - 4] + b"\1" + part[place - 3 :] for part in parts[1:])])
    return whole


BAD = {
    "unknown ending": (text("a.json", "{}"), r"unknown format; allowed endings are \.npz, \.mtx, \.txt"),
    "folder": (lambda path: (path / "a.npz").mkdir(), "cannot be read"),
    "flipped npz": (damaged("authors.npz", lambda whole: whole.replace(b"\3\0\0\0", b"\2\0\0\0", 1)), "Bad CRC-32"),
    "other arrays": (
        lambda path: np.savez(path / "a.npz", rows=ROW),
        r"holds the arrays \['rows'\]; allowed are src_li",
    ),
    "pickled": (authors(src_li=np.array([{}], object)), "allow_pickle=False"),
    "lengths": (authors(dst_li=COL[:3]), r"dst_li \(the second column\) of edges has shape \(3,\); 5 rows"),
    "float ids": (authors(src_li=ROW * 1.0), r"src_li has shape \(5,\), dtype float64; 1-D integers"),
    "negative row": (authors(src_li=ROW - 1), "edge 0 has the row.* -1; allowed are 0 to 3"),
    "column out of range": (authors(dst_li=COL + 1), "edge 1 has the column.* 4; allowed are 0 to 3"),
    "huge unsigned id": (
        authors(src_li=ROW.astype(np.uint64) + np.uint64(2**63)),
        "src_li holds 9223372036854775808; int",
    ),
    "num_nodes zero": (authors(num_nodes=0), "num_nodes is 0; 1 to 2147483647 are allowed"),
    "num_nodes huge": (authors(num_nodes=2**31), "num_nodes is 2147483648; 1 to 2147483647"),
    "feat rows": (authors(feat=np.ones((3, 2))), r"feat of nodes has shape \(3, 2\); 4 rows"),
    "feat NaN": (authors(feat=np.full((4, 2), np.nan)), "node features hold NaN, or numbers beyond float32, in row 0"),
    "label below -1": (authors(label=ROW[:4] - 2), "a label of -2; 0 to 0, and -1 for unknown"),
    "rectangular": (
        lambda path: scipy.sparse.save_npz(path / "m.npz", scipy.sparse.csr_array((3, 4))),
        "3 x 4; a graph",
    ),
    "mtx dense": (text("a.mtx", "%%MatrixMarket matrix array real general\n1 1\n1.0\n"), "a dense array"),
    "words": (text("a.txt", "# c\n0 1\nzero one\n"), "cannot be read .*zero"),
    "id beyond int64": (text("a.txt", "0 1\n99999999999999999999 2\n"), "cannot be read"),
    "a long word": (text("a.csv", "x" * 10**6 + ",1\n0,1\n"), "cannot be read .{1,502}; correct it"),
    "exponent": (text("a.csv", "\n0,1\n1,1e3\n"), "line 3 is '1,1e3'"),
    "an empty id": (text("a.csv", "a;b\n0;1\n\n# c\n1;\n"), "line 5 is '1;'"),
    "one column": (text("a.tsv", "0\n1\n"), "line 1 is '0'"),
    "negative id": (text("a.txt", "0 1\n-3 1\n"), "holds the node id -3; ids of 0 and above"),
    "truncated gzip": (damaged("snap.txt.gz", lambda whole: whole[:-9]), "cannot be read"),
    "csv header only": (text("a.csv", "id_1,id_2\n"), "holds no edge"),
    "csv without a line": (text("a.csv", ""), "holds no edge"),
    "counts": (collection(edge_counts=[2, 1]), "node_counts has 3 entries and edge_counts 2"),
    "sums": (collection(edge_counts=[2, 1, 2]), r"edge_counts have the number\) of edges has shape \(6, 2\); 5 rows"),
    "negative count": (collection(edge_counts=[-1, 4, 3]), "edge_counts 0 or more"),
    "empty graph": (collection(node_counts=[3, 2, 0]), "node_counts must be 1 or more"),
    "id of next graph": (collection(v=[1, 3, 1, 1, 2, 3]), r"edge \[1, 3\] in a graph of 3 nodes"),
    "too few graphs": (
        collection(node_counts=[3, 6], edge_counts=[2, 4]),
        r"batch_size: got 3; .*c\.npz has 2 graphs. Set batch_size \(data.batch_size times data.batches",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_named_with_what_is_wrong(tmp_path, case):
    make, message = BAD[case]
    make(tmp_path)
    (path,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match=message) as caught:
        load(path, batch_size=3)
    assert path.name in str(caught.value)


def test_a_graph_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data.memory.available_bytes", lambda: 2**30)
    with pytest.raises(
        MemoryError, match=r"num_nodes is 2,000,000,000, with 5 edges: about 29\.8 GiB needed, 1\.0 GiB"
    ):
        load(authors_npz(tmp_path / "a.npz", num_nodes=2 * 10**9))
    with pytest.raises(MemoryError, match=r"c\.npz: num_nodes is 2,000,000,005, with 12 edges: about 29\.8 GiB needed"):
        load(collection_npz(tmp_path / "c.npz", node_counts=np.array([3, 2, 2 * 10**9])), batch_size=3)
    zeros = np.zeros(2**18, np.int64)
    np.savez_compressed(tmp_path / "bomb.npz", src_li=zeros, dst_li=zeros, num_nodes=1)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 2**20)
    with pytest.raises(MemoryError, match=r"bomb\.npz: its arrays: about"):
        load(tmp_path / "bomb.npz")


@pytest.mark.parametrize("lines", ['"0","1"\n"1","2"\n', "0.0,1.0\n1.0,2.0\n", "node 1,2nd\n0,1\n1,2\n"])
def test_a_first_line_with_numbers_is_an_edge(tmp_path, lines):
    (tmp_path / "a.csv").write_text(lines)
    assert np.argwhere(dense(load(tmp_path / "a.csv"))).tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("header", "edges"),
    [
        ("source,target", [[1, 0], [2, 0]]),  # 0 -> 1 and 0 -> 2: node 1 attends to 0
        ("Source, Target ,weight", [[1, 0], [2, 0]]),
        ("src;dst", [[1, 0], [2, 0]]),
        ("from\tto", [[1, 0], [2, 0]]),
        ("target,source", [[0, 1], [0, 2]]),
        ("query,key", [[0, 1], [0, 2]]),
        ("key,query", [[1, 0], [2, 0]]),
        ("source_id,target_id", [[1, 0], [2, 0]]),
        ("FromNodeId\tToNodeId", [[1, 0], [2, 0]]),
        ("from_node,to_node", [[1, 0], [2, 0]]),
        ("head,tail", [[1, 0], [2, 0]]),
        ("source,target,target_id", [[1, 0], [2, 0]]),  # not the third, which is 7
        ("node_1,node_2", [[0, 1], [0, 2]]),
    ],
)
def test_a_header_says_the_direction_of_an_edge(tmp_path, header, edges):
    separator = next((one for one in ";\t" if one in header), ",")
    rows = [header, *(separator.join(["0", str(end), "7"][: header.count(separator) + 1]) for end in (1, 2))]
    (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
    assert np.argwhere(dense(load(tmp_path / "a.csv"))).tolist() == edges


def test_a_header_without_a_direction_is_told(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("me,friend\n0,1\n1,2\n")
    load(tmp_path / "a.csv")
    assert "the header names no direction: the first column, me, attends to the second" in caplog.text
    caplog.clear()
    for name, text in {
        "a.csv": "source,target\n0,1\n",
        "b.txt": "# edges go from 1 to 2\n0 1\n",
        "c.txt": "0 1\n",
    }.items():
        (tmp_path / name).write_text(text)
        load(tmp_path / name)
    assert "attends to the second" not in caplog.text
    (tmp_path / "b.txt").write_text("# Nodes: 2 Edges: 1\n# FromNodeId\tToNodeId\n0 1\n")
    assert np.argwhere(dense(load(tmp_path / "b.txt"))).tolist() == [[0, 1]]
    assert "the first column attends to the second; the comment 'FromNodeId\\tToNodeId' is not read" in caplog.text


def test_named_columns_stand_anywhere_and_others_are_told(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("id,source,target,weight\n7,0,1,0.5\n8,0,2,0.5\n")
    assert np.argwhere(dense(load(tmp_path / "a.csv"))).tolist() == [[1, 0], [2, 0]]
    assert "not read, as an edge has no value: column id, weight" in caplog.text
    (tmp_path / "b.txt").write_text("0 1 0.5\n1 2 0.5\n")
    load(tmp_path / "b.txt")
    assert "b.txt: not read, as an edge has no value: column 3" in caplog.text
    (tmp_path / "a.csv").write_text("id,source,target\n7,0,1\n8,0,x\n")
    with pytest.raises(ValueError, match="line 3 is '8,0,x'; two node ids"):
        load(tmp_path / "a.csv")


def test_unknown_labels_are_no_class(tmp_path):
    for label, classes in (([-1, 4, -1, 0], 5), ([-1] * 4, 2)):
        assert load(authors_npz(tmp_path / "l.npz", label=np.array(label))).meta.num_classes == classes


def test_one_node(tmp_path):
    none = np.zeros(0, np.int32)
    for ids, edges in ((none, 0), (np.zeros(1, np.int32), 1)):
        loaded = load(authors_npz(tmp_path / "o.npz", src_li=ids, dst_li=ids, num_nodes=1))
        assert (loaded.meta.num_nodes, loaded.meta.num_edges) == (1, edges)


def test_a_file_under_a_registered_name_is_said(tmp_path, caplog):
    for stem in ("mine", "cora"):
        np.savez(tmp_path / f"{stem}.npz", src_li=[0, 1], dst_li=[1, 0], num_nodes=2)
    data.load("cora", path=tmp_path / "cora.npz")
    data.load("mine", path=tmp_path / "mine.npz")
    assert "registered" not in caplog.text
    data.load("cora", path=tmp_path / "mine.npz")
    assert "mine.npz: read under the name of a registered data set, cora" in caplog.text


def test_a_pipe_is_no_graph(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"a\.csv: cannot be read: a folder, a pipe or a device"):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize("ending", [".nodes.csv", ".nodes.tsv.gz"])
def test_a_table_of_nodes(tmp_path, ending):
    """Lines in no order, a node without edges, labels and parts that are unknown."""
    (tmp_path / "a.csv").write_text("30,10\n20,30\n")
    separator = "," if "csv" in ending else "\t"
    rows = ["height,id,split,label,width", "0.5,30,train,1.0,2", "1e-1,10,,,3", "", "-1,20,test,0,4", "7,40,val,-1,5"]
    content = "\r\n".join(rows).replace(",", separator).encode()
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    loaded = load(tmp_path / "a.csv")
    assert loaded.node_data["id"].tolist() == [10, 20, 30, 40]
    assert np.argwhere(dense(loaded)).tolist() == [[1, 2], [2, 0]]
    np.testing.assert_allclose(loaded.node_data["feat"], [[0.1, 3], [-1, 4], [0.5, 2], [7, 5]])
    assert loaded.labels.tolist() == [-1, 0, 1, -1]
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {"train": [2], "valid": [3], "test": [1]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["id,x", "0,1", "", "1,tall"], "line 4: x is 'tall'; a feature is a finite number"),
        (["id,x", "0,1", "1,"], "line 3: x is empty"),
        (["id,x", "0,1", "1,nan"], "line 3: x is empty"),
        (["id,label", "0,cat", "1,0"], "line 2: label is 'cat'; classes from 0"),
        (["id,label", "0,1.5", "1,0"], "line 2: label is '1.5'"),
        (["id,split", "0,trian", "1,test"], "line 2: split is 'trian'; allowed are train, valid"),
        (["id,split", "0,train", "0,test"], "line 3: id is '0'; and so"),
        (["id,x", "0,1", "1e0,1"], "line 3: id is '1e0'; an integer"),
        (["node,x", "0,1"], "holds 1 nodes with the columns node, x; a header with the column id"),
        (["id,x"], "holds 0 nodes"),
        (["id,x", "0,1"], "has the node id 1, which .*a.nodes.csv lacks"),
        (["id,x", "0,1,5,6,7", "1,1"], "cannot be read"),
    ],
)
def test_a_wrong_table_of_nodes_is_named_with_its_line(tmp_path, rows, message):
    (tmp_path / "a.txt").write_text("0 1\n")
    (tmp_path / "a.nodes.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.txt")
