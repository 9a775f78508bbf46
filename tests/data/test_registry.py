import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims

import data
from data.registry.masks import MASKS

# The names in the paper's tables and in the authors' end-to-end runs, as `data.load` takes them.
PAPER = {
    *("igb-small", "igb-medium", "igb-large", "amazon0505", "com-amazon", "musae-github", "artist", "pubmed", "cora"),
    *("citeseer", "amazon-products", "yelp", "reddit", "blog", "elliptic", "ogbn-products", "ogbn-arxiv"),
    *("ogbn-papers100m", "flickr", "questions", "pascalvoc-sp", "coco-sp", "peptides-func", "peptides-struct"),
    *("ogbg-molhiv", "ogbg-molpcba", "ogbg-ppa", "ogbg-code2", "zinc"),
}
WITHOUT_STATISTICS = {"igb-large", "ogbn-arxiv", "ogbn-papers100m", "flickr", "questions"}
FURTHER = {"facebook-large", "soc-epinions1", "fb100-cornell5", "ego-twitter", "zinc12k-val-test"}
WITH_FILES = [name for name in data.names() if data.info(name) not in MASKS]


def test_every_set_of_the_paper_is_registered():
    assert set(WITH_FILES) == PAPER | FURTHER
    assert data.names()[:2] == ("cora", "citeseer")


@pytest.mark.parametrize("name", data.names())
def test_entry_is_complete_and_frozen(name):
    entry = data.info(name)
    assert entry.name == name
    assert entry.task in ("node", "graph")
    assert entry.homepage.startswith("https://")
    assert entry.licence
    assert entry.citation
    assert min(entry.num_nodes, entry.nnz, entry.num_classes, entry.feature_dim) >= 1
    assert (entry.published is not None) == (name in PAPER - WITHOUT_STATISTICS)
    if entry.task == "graph":
        assert entry.num_graphs == 1024
    if entry.feature_cardinalities:
        assert len(entry.feature_cardinalities) == entry.feature_dim
    if entry.edge_feature_cardinalities:
        assert len(entry.edge_feature_cardinalities) == entry.edge_feature_dim
    with pytest.raises(FrozenInstanceError):
        entry.nnz = 1


@pytest.mark.parametrize("name", WITH_FILES)
def test_every_set_lists_its_files_and_their_urls(name, tmp_path):
    files = data.info(name).official.files(tmp_path)
    assert files
    for remote in files:
        assert remote.target.is_relative_to(tmp_path)
        assert remote.target != tmp_path
        assert remote.url == remote.url.strip()
        assert remote.url.startswith(("https://", "http://")) or name == "igb-large"


@pytest.mark.parametrize("name", [name for name in data.names() if (p := data.info(name).published) and p.tcb_per_rw])
def test_published_figures_agree_with_each_other(name):
    """Means of the paper's table against the block totals, which come from its throughputs, and against its deciles."""
    entry = data.info(name)
    published = entry.published
    assert entry.nnz / published.num_tcbs == pytest.approx(published.nnz_per_tcb, 0.02)
    assert published.num_tcbs / -(-entry.num_nodes // 16) == pytest.approx(published.tcb_per_rw, 0.02)
    if deciles := published.deciles:
        assert len(deciles) == 11
        assert list(deciles) == sorted(deciles)
        assert sum(deciles[:-1]) / 10 <= published.tcb_per_rw <= sum(deciles[1:]) / 10


def test_an_assumed_direction_is_noted():
    assumed = {name for name in data.names() if "is an assumption" in data.info(name).note}
    snap = {"com-amazon", "amazon0505", "artist", "soc-epinions1"}
    assert assumed == {*snap, "igb-small", "igb-medium", "igb-large"}


def test_atom_and_bond_codes_are_those_of_ogb():
    assert data.info("ogbg-molhiv").feature_cardinalities == tuple(get_atom_feature_dims())
    for name in ("ogbg-molhiv", "ogbg-molpcba", "peptides-func", "peptides-struct"):
        assert data.info(name).edge_feature_cardinalities == tuple(get_bond_feature_dims())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"got 'coral'; registered are cora, citeseer.*path="):
        data.info("coral")


def test_importing_data_loads_no_heavy_package():
    code = "import data, sys; print(sorted({'dgl', 'ogb', 'torch', 'pandas', 'cupy', 'requests'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_readme_lists_every_set():
    text = (Path(data.__file__).parent / "README.md").read_text()
    for name in WITH_FILES:
        entry = data.info(name)
        assert f"| `{name}` | {entry.task} | {entry.num_nodes:,} | {entry.nnz:,} |" in text
