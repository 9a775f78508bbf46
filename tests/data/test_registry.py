import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest
from ogb.utils.features import get_atom_feature_dims

import data


def test_names_are_the_data_sets_of_the_configs():
    assert data.names() == ("cora", "citeseer", "pubmed", "musae-github", "elliptic", "ogbg-molhiv")


@pytest.mark.parametrize("name", data.names())
def test_entry_is_complete_and_frozen(name):
    entry = data.info(name)
    assert entry.name == name
    assert entry.task in ("node", "graph")
    for field in fields(entry):
        if field.default == "" or field.name in ("official", "feature_cardinalities", "num_graphs", "symmetric"):
            continue
        assert getattr(entry, field.name), field.name
    assert entry.homepage.startswith("https://")
    assert (entry.task == "graph") == (entry.num_graphs is not None)
    if entry.feature_cardinalities:
        assert len(entry.feature_cardinalities) == entry.feature_dim
    with pytest.raises(FrozenInstanceError):
        entry.nnz = 1


def test_atom_codes_are_those_of_ogb():
    assert data.info("ogbg-molhiv").feature_cardinalities == tuple(get_atom_feature_dims())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"got 'coral'; registered are cora, citeseer.*path="):
        data.info("coral")


def test_importing_data_loads_no_heavy_package():
    code = "import data, sys; print(sorted({'dgl', 'ogb', 'torch', 'pandas', 'cupy', 'requests'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
