"""The table of data sets: complete entries, and figures that agree with each other and with ogb."""

import subprocess
import sys

import pytest
from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims

import data
from data.synthetic.generate import NoSurrogate


@pytest.mark.parametrize("name", data.names())
def test_entry_is_complete(name, tmp_path):
    entry = data.info(name)
    assert min(entry.num_nodes, entry.nnz, entry.num_classes, entry.feature_dim) >= 1
    assert (entry.task == "graph") <= (entry.num_graphs == 1024)
    if entry.feature_cardinalities:
        assert len(entry.feature_cardinalities) == entry.feature_dim
    if entry.edge_feature_cardinalities:
        assert len(entry.edge_feature_cardinalities) == entry.edge_feature_dim
    files = entry.official.files(tmp_path)
    assert bool(files) != isinstance(entry.synthetic, NoSurrogate)
    assert all(tmp_path in remote.target.parents for remote in files)
    assert entry.official.is_present(tmp_path) == (not files)


@pytest.mark.parametrize("name", [name for name in data.names() if (p := data.info(name).published) and p.tcb_per_rw])
def test_published_figures_agree_with_each_other(name):
    """Means of the paper's table against the block totals, which come from its throughputs, and against its deciles."""
    entry = data.info(name)
    published = entry.published
    assert entry.nnz / published.num_tcbs == pytest.approx(published.nnz_per_tcb, 0.02)
    assert published.num_tcbs / -(-entry.num_nodes // 16) == pytest.approx(published.tcb_per_rw, 0.02)
    if deciles := published.deciles:
        assert len(deciles) == 11
        assert sum(deciles[:-1]) / 10 <= published.tcb_per_rw <= sum(deciles[1:]) / 10


def test_atom_and_bond_codes_are_those_of_ogb():
    for name in ("ogbg-molhiv", "ogbg-molpcba", "peptides-func", "peptides-struct"):
        assert data.info(name).feature_cardinalities == tuple(get_atom_feature_dims())
        assert data.info(name).edge_feature_cardinalities == tuple(get_bond_feature_dims())


@pytest.mark.parametrize("name", [3, None, ["cora"], "coral", b"cora"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"name: got .*; registered are cora, citeseer.*path="):
        data.info(name)


def test_importing_data_loads_no_heavy_package():
    code = "import data, sys; data.names(); print(sorted({'dgl', 'ogb', 'torch', 'pandas', 'cupy'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
