"""Wrong graph files end in one error that names the file and the array, before memory is taken for them."""

import builtins
import errno
import gzip
import io
import pathlib
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import data
from data import edge_text

ROW, COL, NODES = np.array([0, 0, 1, 2, 2]), np.array([1, 3, 2, 0, 2]), 4
GRAPH = {"src_li": ROW, "dst_li": COL, "num_nodes": NODES}
COLLECTION = {
    "node_counts": np.array([3, 2, 4]),
    "edge_counts": np.array([2, 1, 3]),
    "u": np.array([0, 1, 0, 0, 1, 3]),
    "v": np.array([1, 2, 1, 1, 2, 3]),
}
BATCH = 3
GIB = 2**30


def load(path, **options):
    return data.load("mine", path=path, **{"batch_size": BATCH} | options)


def graph(**changed):
    return lambda path: np.savez(path / "a.npz", **GRAPH | changed)


def collection(**changed):
    return lambda path: np.savez(path / "c.npz", **COLLECTION | {key: np.array(new) for key, new in changed.items()})


def sparse(kind, **arrays):
    shape = np.array([4, 4])
    return lambda path: np.savez(path / "m.npz", **{"format": kind.encode(), "shape": shape, **arrays})


def content(name, text):
    return lambda path: (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def mtx(header, *lines):
    return content("a.mtx", "\n".join([f"%%MatrixMarket matrix {header}", *lines, ""]))


def member(name, stored, *, compressed=True):
    """A valid graph file in which the bytes of one member are replaced."""

    def make(path):
        graph()(path)
        with zipfile.ZipFile(path / "a.npz") as archive:
            members = {one: archive.read(one) for one in archive.namelist()}
        with zipfile.ZipFile(
            path / "a.npz", "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        ) as archive:
            for one, kept in (members | {f"{name}.npy": stored(members[f"{name}.npy"])}).items():
                archive.writestr(one, kept)

    return make


def header(text):
    """An .npy file without numbers whose header is `text`."""
    return lambda _: b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text.encode() + b"\n"


def flipped(place):
    def make(path):
        graph(src_li=np.arange(4).repeat(500) % 4, dst_li=np.arange(2000) % 4)(path)
        damaged = bytearray((path / "a.npz").read_bytes())
        damaged[place if isinstance(place, int) else damaged.rfind(place)] ^= 255
        (path / "a.npz").write_bytes(damaged)

    return make


def encrypted(path):
    """Every member says that it is encrypted."""
    graph()(path)
    content = bytearray((path / "a.npz").read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = -1
        while (place := content.find(signature, place + 1)) >= 0:
            content[place + flags] |= 1
    (path / "a.npz").write_bytes(content)


def twice(path):
    graph()(path)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path / "a.npz", "a") as archive:
        archive.writestr("src_li.npy", "text")


COO = {"data": np.ones(1), "row": np.array([1]), "col": np.array([0])}
CSR = {"data": np.ones(1), "indices": np.array([0]), "indptr": np.array([0, 1, 1, 1, 1])}
BAD = {
    # sizes that do not fit each other
    "num_nodes negative": (graph(num_nodes=-1), "num_nodes is -1; 1 to 2147483647 are allowed"),
    "num_nodes beyond int64": (graph(num_nodes=np.uint64(2**63 + 1)), "num_nodes is 9223372036854775809; 1 to"),
    "num_nodes fraction": (graph(num_nodes=4.0), "num_nodes has shape .*float64; one integer"),
    "num_nodes empty": (graph(num_nodes=np.zeros(0, int)), r"num_nodes has shape \(0,\)"),
    "ids boolean": (graph(src_li=ROW > 0), "src_li has .*bool; 1-D integers"),
    "ids complex": (graph(dst_li=COL + 0j), "dst_li has .*complex128; 1-D integers"),
    "ids text": (graph(src_li=ROW.astype(str)), "src_li has .*<U.*; 1-D integers"),
    "ids dates": (graph(src_li=ROW.astype("M8[s]")), "src_li has .*datetime64.*; 1-D integers"),
    "ids record": (graph(src_li=np.zeros(5, "i4,i4")), "src_li has shape .*; 1-D integers"),
    "ids scalar": (graph(src_li=1), r"src_li has shape \(\)"),
    "ids pickled beside": (graph(dst_li=np.array([{}] * 5)), "dst_li holds pickled objects, which are refused"),
    "id 2^62": (
        graph(src_li=np.array([0, 0, 1, 2, 2**62])),
        "edge 4 has the row .* 4611686018427387904; allowed are 0",
    ),
    # labels
    "label 10^10": (graph(label=np.array([0, 10**10, 1, 1])), "label holds 10000000000; classes from 0 to 999999"),
    "label 2^62": (graph(label=np.array([0, 2**62, 1, 1])), "label holds 4611686018427387904; classes from 0"),
    "label int64 minimum": (graph(label=np.array([0, -(2**63), 1, 1])), "label holds -9223372036854775808; classes"),
    "label beyond int64": (
        graph(label=np.array([0, 2**63, 1, 1], np.uint64)),
        r"label holds .*808; integers below 2\^63",
    ),
    "label float": (graph(label=np.ones(4)), "label has .*float64; 1-D integers"),
    "label of classes": (graph(label=np.ones((4, 2), int)), r"label has shape \(4, 2\)"),
    "label empty": (graph(label=np.zeros(0, int)), "label has 0 entries; one for each of 4 nodes"),
    # features
    "feat without columns": (graph(feat=np.ones((4, 0))), r"feat has shape \(4, 0\).*\[4, F\]"),
    "feat of a vector": (graph(feat=np.ones(4)), r"feat has shape \(4,\).*\[4, F\]"),
    "feat of cubes": (graph(feat=np.ones((4, 2, 2))), r"feat has shape \(4, 2, 2\)"),
    "feat of integers": (graph(feat=np.ones((4, 2), int)), "feat has .*int64; floats of shape"),
    "feat boolean": (graph(feat=np.ones((4, 2), bool)), "feat has .*bool; floats of shape"),
    "feat complex": (graph(feat=np.ones((4, 2), complex)), "feat has .*complex128; floats of shape"),
    "feat infinite": (graph(feat=np.full((4, 2), np.inf)), "feat holds NaN, or numbers beyond float32"),
    "edge_feat rows": (graph(edge_feat=np.ones((4, 2))), r"edge_feat has shape \(4, 2\).*\[5, F\]"),
    "edge_feat code 10^10": (graph(edge_feat=np.full((5, 1), 10**10)), "edge_feat holds 10000000000; codes from 0 to"),
    "edge_feat code -1": (graph(edge_feat=np.full((5, 1), -1)), "edge_feat holds -1; codes from 0 to 999999"),
    "edge_feat NaN": (graph(edge_feat=np.full((5, 1), np.nan)), "edge_feat holds NaN"),
    # splits
    "split of one part": (graph(train_ids=ROW[:1]), "test_ids is missing"),
    "split of floats": (
        graph(train_ids=np.ones(1), valid_ids=ROW[:0], test_ids=ROW[:0]),
        "train_ids has .*float64; 1-D integers",
    ),
    "split beyond": (graph(train_ids=np.array([4]), valid_ids=ROW[:0], test_ids=ROW[:0]), "hold 4; allowed are 0 to 3"),
    "split twice": (graph(train_ids=np.array([1]), valid_ids=np.array([1]), test_ids=ROW[:0]), "hold 1 twice"),
    # collections
    "node count 2^31": (collection(node_counts=[2**31, 2, 4]), "node_counts of graph 0 is 2147483648; 1 to 2147483647"),
    "node counts beyond int64": (collection(node_counts=[2**62] * 3), "node_counts of graph 0 is 4611686018427387904"),
    "node counts unsigned": (
        collection(node_counts=np.array([2**63, 2, 4], np.uint64)),
        r"node_counts holds 9223372036854775808; integers below 2\^63",
    ),
    "sum of node counts": (
        collection(node_counts=[2**31 - 1, 2, 4]),
        "the sum of node_counts of the chosen graphs is 2147483653; 1 to 2147483647",
    ),
    "edge counts beyond int64": (
        collection(edge_counts=[2**62, 2**62, 6 - 2**63]),
        "edge_counts of graph 0 is 4611686018427387904; 0 to 6 are allowed",
    ),
    "no graph": (
        collection(node_counts=np.zeros(0, int), edge_counts=np.zeros(0, int), u=np.zeros(0, int), v=np.zeros(0, int)),
        "node_counts is empty; a collection has one graph or more",
    ),
    "u and v": (collection(v=[1, 2, 1, 1, 2]), "u has 6 entries and v 5; they must agree"),
    "u of floats": (collection(u=np.zeros(6)), "u has .*float64; 1-D integers"),
    "negative end": (collection(u=[0, -1, 0, 0, 1, 3]), "edge 1 joins -1 and 2 in a graph of 3 nodes"),
    "graph_label infinite": (collection(graph_label=[[np.inf], [0], [1]]), "graph_label holds infinity"),
    "graph_label beyond float32": (
        collection(graph_label=[[1e300], [0], [1]]),
        "graph_label holds infinity, or numbers",
    ),
    "graph_label rows": (collection(graph_label=[[1.0], [0]]), r"graph_label has shape \(2, 1\).*\[3, tasks\]"),
    "graph_label vector": (collection(graph_label=[1.0, 0, 0]), r"graph_label has shape \(3,\)"),
    "graph_label text": (collection(graph_label=[["a"], ["b"], ["c"]]), "graph_label has .*<U1; numbers"),
    "feat of a collection": (collection(feat=np.ones((8, 2))), r"feat has shape \(8, 2\).*\[9, F\]"),
    # SciPy's formats
    "format unknown": (sparse("foo"), "not a sparse matrix as SciPy writes it .*foo"),
    "format an array": (lambda path: np.savez(path / "m.npz", format=np.arange(5)), "not a sparse matrix"),
    "format alone": (lambda path: np.savez(path / "m.npz", format=b"csr"), "not a sparse matrix .*shape"),
    "shape of three": (sparse("coo", **COO | {"shape": np.array([4, 4, 4])}), "not a sparse matrix"),
    "shape of text": (sparse("coo", **COO | {"shape": np.array(["4", "x"])}), "not a sparse matrix"),
    "shape negative": (sparse("coo", **COO | {"shape": np.array([-4, -4])}), "the matrix's number of rows is -4; 1 to"),
    "csr of 2^40 rows": (sparse("csr", **CSR | {"shape": np.array([2**40] * 2)}), "number of rows is 1099511627776; 1"),
    "csr of a short indptr": (sparse("csr", **CSR | {"indptr": np.array([0, 1])}), "not a sparse matrix"),
    "coo of a negative row": (
        sparse("coo", **COO | {"row": np.array([-1])}),
        "edge 0 has the row .* -1; allowed are 0",
    ),
    "csc of few numbers": (
        sparse("csc", **CSR | {"indices": np.array([2, 0, 1, 2, 0]), "indptr": np.array([0, 1, 2, 4, 5])}),
        r"not a sparse matrix as SciPy writes it \(data has shape \(1,\), indices \(5,\)",
    ),
    "dia far away": (
        sparse("dia", data=np.array([4, -1]), offsets=np.array([4])),
        "not a sparse matrix .*data has shape",
    ),
    "dia twice": (sparse("dia", data=np.ones((2, 4)), offsets=np.array([1, 1])), "an offset twice"),
    "coo of objects": (sparse("coo", **COO | {"data": np.array([None])}), "data holds pickled objects"),
    "coo of text": (sparse("coo", **COO | {"row": np.array(["1"])}), "row has dtype <U1; integers are needed"),
    "coo of fractions": (sparse("coo", **COO | {"row": np.array([0.5])}), "row has dtype float64; integers are needed"),
    "csr of no number": (sparse("csr", **CSR | {"indptr": np.full(5, np.nan)}), "indptr has dtype float64; integers"),
    "coo of two lengths": (sparse("coo", **COO | {"data": np.ones(3)}), "not a sparse matrix"),
    "bsr of empty blocks": (sparse("bsr", **CSR | {"data": np.ones((1, 0, 0))}), "not a sparse matrix"),
    "dia of nothing": (sparse("dia", data=np.ones(3), offsets=np.array([[0]])), "not a sparse matrix"),
    # damage
    "flipped in the numbers": (flipped(900), r"a\.npz: damaged \(Bad CRC-32"),
    "flipped in a header": (flipped(60), r"a\.npz: "),
    "flipped in the directory": (flipped(b"PK\x01\x02"), r"a\.npz: "),
    "numbers cut off": (member("src_li", lambda npy: npy[:-8]), "src_li.npy holds 32 bytes, and its shape .* needs 40"),
    "numbers too many": (member("src_li", lambda npy: npy + b"12345678"), "src_li.npy holds 48 bytes"),
    "header cut off": (member("src_li", lambda npy: npy[:30]), "a header that NumPy cannot read"),
    "header with code": (
        member("src_li", header("{'descr': '<i8', 'fortran_order': False, 'shape': (__import__('os').getpid(),)}")),
        "a header that NumPy cannot read",
    ),
    "header with a negative shape": (
        member("src_li", header("{'descr': '<i8', 'fortran_order': False, 'shape': (-5,), }")),
        r"a header with the shape \(-5,\)",
    ),
    "header of brackets": (member("src_li", header("(" * 9000)), "a header that NumPy cannot read"),
    "header of another version": (member("src_li", lambda npy: npy[:6] + b"\x09\x00" + npy[8:]), "NumPy cannot read"),
    "member that is text": (member("src_li", lambda _: b"0 0 1 2 2"), "src_li should be in NumPy's format"),
    "encrypted": (encrypted, "encrypted, password required"),
    "a name twice": (twice, "src_li should be in NumPy's format"),
    "a page": (content("a.npz", "<!DOCTYPE html><html>log in</html>"), "not an .npz archive"),
    # Matrix Market
    "mtx of 2^70 rows": (mtx("coordinate pattern general", f"{2**70} {2**70} 1", "1 1"), "not a Matrix Market file"),
    "mtx of 2^40 rows": (mtx("coordinate pattern general", f"{2**40} {2**40} 1", "1 1"), "rows is 1099511627776; 1 to"),
    "mtx negative": (mtx("coordinate pattern general", "-2 -2 1", "1 1"), "not a Matrix Market file"),
    "mtx of no rows": (mtx("coordinate pattern general", "0 0 0"), "number of rows is 0; 1 to"),
    "mtx of 10^11 entries": (
        mtx("coordinate pattern general", "2 2 99999999999", "1 1"),
        "or truncated: 99999999999 entries in 69 bytes",
    ),
    "mtx of a large array": (
        mtx("array real general", "2000000 2000000", "1.0"),
        "holds a dense array; the coordinate",
    ),
    "mtx rectangular": (mtx("coordinate pattern general", "2 3 1", "1 1"), "2 x 3; a graph needs a square one"),
    "mtx entry 0": (mtx("coordinate pattern general", "2 2 1", "0 1"), "not a Matrix Market file"),
    "mtx with a colon": (mtx("coordinate pattern symmetric", "4 4 3", "2 1", "3 3", "4 2:"), "line 5 is '4 2:'"),
    "mtx with a word": (mtx("coordinate pattern general", "2 2 1", "one 1"), "line 3 is 'one 1'"),
    "mtx of a vector": (content("a.mtx", "%%MatrixMarket vector coordinate real general\n2 1\n1 1\n"), "not a Matrix"),
    "mtx of a field": (
        mtx("coordinate colour general", "2 2 1", "1 1"),
        "its first line is '%%MatrixMarket matrix coo",
    ),
    "mtx of a symmetry": (mtx("coordinate pattern round", "2 2 1", "1 1"), "its first line is"),
    "mtx without sizes": (mtx("coordinate pattern general", "% nothing"), "rows, columns and entries are needed"),
    "mtx of two sizes": (mtx("coordinate pattern general", "2 2", "1 1"), "line 2 is '2 2'; rows, columns and entries"),
    "mtx too many entries": (mtx("coordinate pattern general", "2 2 1", "1 1", "1 2"), "2 of 1 entries"),
    "mtx beyond": (
        mtx("coordinate pattern general", "2 2 2", "1 1", "3 1"),
        r"entry 1 has the ids \[3, 1\]; 1 to 2 are",
    ),
    "mtx too few entries": (mtx("coordinate pattern general", "2 2 2", "1 1"), "not a Matrix Market file"),
    # text
    "hexadecimal": (content("a.txt", "0x1 2\n"), "line 1 is '0x1 2'"),
    "infinite": (content("a.txt", "0 inf\n"), "line 1 is '0 inf'"),
    "a zero byte": (content("a.txt", b"0 1\n1 \x00 2\n"), "line 2 is"),
    "utf-16": (content("a.txt", "0 1\n1 2\n".encode("utf-16")), "line 1 is"),
    "a long id": (content("a.txt", "0 1\n" + "1" * 10**6 + " 2\n"), "line 2 is '1111"),
    "an empty field": (content("a.csv", "0,\n1,2\n"), "line 1 is '0,'"),
    "an open quote": (content("a.csv", '"0,1\n1,2\n'), "line 1 is"),
    "one column of csv": (content("a.csv", "a\n1\n"), "line 2 is '1'"),
    "a page in gzip": (content("a.txt.gz", gzip.compress(b"<html>log in</html>")), "line 1 is '<html>log in"),
    "gzip of nothing": (content("a.txt.gz", gzip.compress(b"")), "holds no edge"),
    "gzip flipped": (
        content("a.txt.gz", gzip.compress(b"0 1\n" * 500)[:-8] + b"12345678"),
        "damaged or truncated gzip",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_error_that_names_it(tmp_path, case):
    make, message = BAD[case]
    make(tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert path.read_bytes() == before


def claim(**shapes):
    """A graph file of four nodes whose arrays have these shapes: zeros, compressed to nothing."""

    def make(path):
        with zipfile.ZipFile(path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            with archive.open("num_nodes.npy", "w") as stream:
                np.lib.format.write_array(stream, np.array(4))
            for name, shape in shapes.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    about = {"descr": "<i8", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(stream, about)
                    left = int(np.prod(shape)) * 8
                    while left:
                        left -= stream.write(bytes(min(left, 2**20)))

    return make


EDGES = 3 * 2**20  # 24 MiB in each array
TOO_LARGE = {
    "num_nodes 2*10^9": (graph(num_nodes=2 * 10**9), "num_nodes is 2,000,000,000, with 5 edges: about 29.8 GiB needed"),
    "node counts": (
        collection(node_counts=[2**30, 2, 4]),
        "sum of node_counts of the chosen graphs is 1,073,741,830, with 12 edges: about 16.0 GiB needed",
    ),
    "mtx": (mtx("coordinate pattern general", "2000000000 2000000000 1", "1 1"), "number of rows is 2,000,000,000"),
    "csr": (sparse("coo", **COO | {"shape": np.array([10**9] * 2)}), "number of rows is 1,000,000,000"),
    "dia": (
        sparse("dia", data=np.ones((50, 1)), offsets=np.arange(50), shape=np.array([10**7] * 2)),
        "rows is 10,000,000, with 500,000,000 edges",
    ),
    "edges": (claim(src_li=(EDGES,), dst_li=(EDGES,)), "num_nodes is 4, with 3,145,728 edges: about 0.1 GiB needed"),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_graph_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch, case):
    make, message = TOO_LARGE[case]
    make(tmp_path)
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr("data.memory.available_bytes", lambda: 100 * 2**20 if case == "edges" else GIB)
    tracemalloc.start()
    try:
        with pytest.raises(MemoryError, match=message) as caught:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))


def test_random_features_that_do_not_fit_are_refused_before_the_edges_are_sorted(tmp_path, monkeypatch):
    graph(num_nodes=10**6)(tmp_path)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 100 * 2**20)
    monkeypatch.setattr("data.loader.to_csr", None)
    with pytest.raises(MemoryError, match=r"a\.npz: random features of 1,000,000 rows by 64: about 0\.2 GiB needed"):
        load(tmp_path / "a.npz")


def test_shapes_are_compared_before_arrays_are_read(tmp_path, monkeypatch):
    claim(src_li=(EDGES,), dst_li=(EDGES + 1,))(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        assert archive.getinfo("src_li.npy").file_size > 2**24
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"src_li has 3145728 entries and dst_li 3145729; they must agree"):
        load(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_an_edge_list_that_does_not_fit(tmp_path, monkeypatch, ending):
    text = b"0 1\n" * 10**6
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 10**7)
    with pytest.raises(MemoryError, match=r"a\.txt.*: an edge list of 1,000,000 lines: about 0\.1 GiB needed"):
        load(path)
    monkeypatch.setattr("data.memory.available_bytes", lambda: GIB)
    assert len(edge_text.read_snap_edges(path)) == 10**6


@pytest.mark.parametrize("name", ["a.npz", "a.mtx", "a.txt", "a.csv"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path, monkeypatch, name, code):
    (tmp_path / name).write_text("0 1\n")
    real = builtins.open

    def refuse(file, *arguments, **options):
        if str(file).endswith(name):
            raise OSError(code, "the system's reason", str(file))
        return real(file, *arguments, **options)

    for module in (builtins, io):  # as of a user without the permission; root may read everything
        monkeypatch.setattr(module, "open", refuse)
    monkeypatch.setattr(pathlib.Path, "open", lambda path, *arguments, **options: refuse(path, *arguments, **options))
    with pytest.raises(ValueError, match=r"cannot be opened \(the system's reason\); the file may be fine") as caught:
        load(tmp_path / name)
    assert "damaged" not in str(caught.value)


def test_a_name_that_is_too_long_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"\.npz: cannot be opened \(File name too long\)"):
        load(tmp_path / f"{'a' * 300}.npz")


def test_arrays_that_are_not_read_are_named(tmp_path, caplog):
    graph(features=np.ones((4, 2)), labels=np.ones(4))(tmp_path)
    assert load(tmp_path / "a.npz").meta.features == "random"
    assert "a.npz: the arrays features, labels are not read; those that are read besides src_li" in caplog.text


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("cora", {"label": np.array([0, 7, 1, 1])}, r"label 7 of node 1; 0 to 6, and -1 for unknown, are allowed"),
        ("zinc", {"edge_feat": np.full((5, 1), 4)}, r"edge features hold the code 4 in row 0, column 0; 0 to 3 are"),
        ("zinc", {"edge_feat": np.zeros((5, 2), int)}, "edge features have 2 columns of codes; 1 are needed"),
    ],
)
def test_a_file_under_a_registered_name_has_its_classes_and_codes(tmp_path, name, changed, message):
    graph(**changed)(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} \(.*a\.npz\): {message}"):
        data.load(name, source="file", path=tmp_path / "a.npz", edge_features=name == "zinc")


@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("ogbg-molhiv", np.ones((3, 5)), "graph labels have 5 columns; 1 are needed"),
        ("peptides-func", np.ones((3, 1)), "graph labels have 1 columns; 10 are needed"),
        ("ogbg-ppa", np.ones((3, 37)), "graph labels have 37 columns; 1 are needed"),
        ("ogbg-ppa", np.array([[0], [37], [1]]), "a graph label of 37; classes 0 to 36 are allowed"),
        ("ogbg-ppa", np.array([[0], [0.5], [1]]), "a graph label of 0.5; classes 0 to 36 are allowed"),
    ],
)
def test_a_collection_under_a_registered_name_has_its_tasks(tmp_path, name, labels, message):
    collection(graph_label=labels)(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} \(.*c\.npz\): {message}"):
        data.load(name, source="file", path=tmp_path / "c.npz", batch_size=3)


@pytest.mark.parametrize("tasks", [1, 5])
def test_a_collection_of_ones_own_has_as_many_outputs_as_tasks(tmp_path, tasks):
    collection(graph_label=np.ones((3, tasks)))(tmp_path)
    assert load(tmp_path / "c.npz").meta.num_classes == tasks


def test_a_header_may_hold_latin_letters(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"n\xe9, n2\n0,1\n")
    assert load(tmp_path / "a.csv").meta.num_edges == 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["csr", "csc", "coo", "bsr", "dia"]))
def test_matrices_are_those_that_scipy_reads(tmp_path, drawn, kind):
    """SciPy's own reader is the oracle for what it wrote."""
    size, height = drawn.draw(st.sampled_from([(1, 1), (4, 2), (6, 3), (6, 2), (7, 1)]))
    ends = drawn.draw(st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=12))
    row, col = np.array(ends, np.int64).reshape(-1, 2).T
    values = np.array(drawn.draw(st.lists(st.sampled_from([0.0, 1.0, -2.5]), min_size=row.size, max_size=row.size)))
    matrix = scipy.sparse.coo_array((values, (row, col)), (size, size))
    matrix = matrix.tobsr((height, height)) if kind == "bsr" else matrix.asformat(kind)
    scipy.sparse.save_npz(tmp_path / "m.npz", matrix)
    theirs = scipy.sparse.load_npz(tmp_path / "m.npz").tocoo()
    keys, queries = load(tmp_path / "m.npz").graph.edges()
    expected = sorted(set(zip(theirs.row.tolist(), theirs.col.tolist(), strict=True)))
    assert sorted(zip(queries.tolist(), keys.tolist(), strict=True)) == expected


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12, unique=True),
    st.sampled_from(["real", "integer", "pattern", "complex"]),
    st.sampled_from(["general", "symmetric", "skew-symmetric", "hermitian"]),
    st.sampled_from(["", "a comment", "two\nlines"]),
)
def test_matrix_market_files_are_those_that_scipy_writes_and_reads(tmp_path, ends, field, symmetry, comment):
    row, col = np.array(ends, np.int64).reshape(-1, 2).T
    if symmetry != "general":
        lower = row > col if symmetry == "skew-symmetric" else row >= col
        row, col = row[lower], col[lower]
    values = np.arange(1, row.size + 1).astype({"complex": complex, "integer": int}.get(field, float))
    matrix = scipy.sparse.coo_array((values, (row, col)), (7, 7))
    scipy.io.mmwrite(tmp_path / "m.mtx", matrix, comment=comment, field=field, symmetry="general")
    text = (tmp_path / "m.mtx").read_text()
    (tmp_path / "m.mtx").write_text(text.replace("general", symmetry, 1))
    theirs = scipy.io.mmread(tmp_path / "m.mtx").tocoo()
    keys, queries = load(tmp_path / "m.mtx").graph.edges()
    expected = sorted(set(zip(theirs.row.tolist(), theirs.col.tolist(), strict=True)))
    assert sorted(zip(queries.tolist(), keys.tolist(), strict=True)) == expected


# What a program of a user's own may write: right names, anything in them.
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=6)
TYPES = st.sampled_from(
    ["?", "<i1", "<u1", "<i2", "<i4", "<u4", "<i8", "<u8", ">i4", "<f2", "<f4", "<f8", "<c8", "<U2"]
)
SMALL = st.integers(0, 3)
LARGE = st.sampled_from([-1, 4, 6, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)])


def loaded_or_refused(path, **options):
    """The graph; None after an error that names the file."""
    try:
        return load(path, **options)
    except (ValueError, MemoryError) as error:
        text = str(error)
    assert path.name in text
    return None


@st.composite
def any_array(draw):
    kind = draw(st.sampled_from(["ids", "ids", "count", "anything"]))
    if kind == "ids":
        return np.array(
            draw(
                st.lists(SMALL | LARGE if draw(st.booleans()) else SMALL, min_size=draw(st.integers(0, 5)), max_size=6)
            ),
            np.int64,
        )
    if kind == "count":
        return np.int64(draw(SMALL | LARGE))
    return draw(arrays_of.arrays(draw(TYPES), SHAPES))


NAMES = {
    "graph": ["src_li", "dst_li", "num_nodes", "feat", "label", "edge_feat", "train_ids", "valid_ids", "test_ids"],
    "collection": [*COLLECTION, "feat", "graph_label", "train_ids"],
    "matrix": ["data", "indices", "indptr", "row", "col", "offsets", "shape"],
}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_arrays_load_or_are_an_error_that_names_the_file(tmp_path, monkeypatch, drawn):
    monkeypatch.setattr("data.memory.available_bytes", lambda: GIB)
    layout = drawn.draw(st.sampled_from(sorted(NAMES)))
    path = tmp_path / "random.npz"
    valid = {"graph": GRAPH, "collection": COLLECTION}.get(layout, {})
    if layout == "matrix":
        kind = drawn.draw(st.sampled_from(["csr", "csc", "coo", "bsr", "dia"]))
        stored = scipy.sparse.coo_array((np.ones(5), (ROW, COL)), (NODES, NODES)).asformat(kind)
        scipy.sparse.save_npz(path, stored)
        with np.load(path) as archive:
            valid = dict(archive)
    changed = drawn.draw(st.lists(st.sampled_from(NAMES[layout]), max_size=3, unique=True))
    arrays = valid | {name: drawn.draw(any_array()) for name in changed}
    np.savez(path, **arrays)
    loaded = loaded_or_refused(path, batch_size=drawn.draw(st.sampled_from([1, 3, None])))
    if loaded is None:
        return
    assert 1 <= loaded.meta.num_nodes <= 2**31
    keys, queries = loaded.graph.edges()
    for ids in (keys, queries):
        assert ids.numel() == 0 or 0 <= int(ids.min()) <= int(ids.max()) < loaded.meta.num_nodes
    assert loaded.graph.ndata["feat"].isfinite().all()
    if "label" in loaded.graph.ndata:
        assert int(loaded.graph.ndata["label"].max()) < loaded.meta.num_classes <= 10**6


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 300))
def test_damaged_archives_load_or_are_an_error_that_names_the_file(tmp_path, monkeypatch, changes, cut):
    monkeypatch.setattr("data.memory.available_bytes", lambda: GIB)
    graph(feat=np.ones((4, 2)), label=ROW[:4])(tmp_path)
    damaged = bytearray((tmp_path / "a.npz").read_bytes())
    for place, value in changes:
        damaged[place % len(damaged)] = value
    (tmp_path / "a.npz").write_bytes(damaged[: len(damaged) - cut * (cut % 5 == 0)])
    loaded = loaded_or_refused(tmp_path / "a.npz")
    assert loaded is None or loaded.meta.num_edges == 5  # a byte that is not read, or the same byte


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([".txt", ".csv", ".mtx", ".txt.gz"]),
    st.text(st.sampled_from("0123456789 \t\n,#-.e+x%\"'\x00é"), max_size=60) | st.binary(max_size=60),
)
def test_random_text_loads_or_is_an_error_that_names_the_file(tmp_path, monkeypatch, ending, text):
    monkeypatch.setattr("data.memory.available_bytes", lambda: GIB)
    path = tmp_path / f"random{ending}"
    text = text.encode() if isinstance(text, str) else text
    if ending == ".mtx":
        text = b"%%MatrixMarket matrix coordinate pattern general\n" + text
    path.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
    loaded = loaded_or_refused(path)
    assert loaded is None or loaded.meta.num_nodes >= 1
