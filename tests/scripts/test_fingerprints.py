"""Fingerprints of small molecules whose neighbourhoods can be counted by hand."""

import importlib
from types import SimpleNamespace

import numpy as np
import torch


def bits(atoms, bonds, order=None):
    """Of one molecule: atoms {number: code}, bonds {(a, b): code} in both directions; atoms in another order."""
    order = list(order or atoms)
    place = {atom: i for i, atom in enumerate(order)}
    edges = sorted(
        (place[b], place[a], code) for (a, b), code in [*bonds.items(), *((k[::-1], c) for k, c in bonds.items())]
    )
    rows, columns, codes = (np.array([edge[i] for edge in edges]) for i in range(3))
    molecule = SimpleNamespace(
        graph_sizes=torch.tensor([len(atoms)]),
        row_pointers=torch.from_numpy(np.searchsorted(rows, np.arange(len(atoms) + 1))),
        columns=torch.from_numpy(columns),
        node_data={"feat": torch.tensor([[atoms[atom]] for atom in order])},
        edge_data={"feat": torch.from_numpy(codes)[:, None]},
    )
    return importlib.import_module("fingerprints").fingerprints(molecule)[0]


def test_neighbourhoods_are_counted_once_whatever_the_order_of_atoms():
    chain = dict.fromkeys(range(5), 6), {(i, i + 1): 1 for i in range(4)}
    found = bits(*chain)
    assert found.sum() == 1 + 2 + 3  # radius 0: an atom; 1: end, middle; 2: end, next to it, middle
    assert (bits(*chain, order=[3, 0, 4, 1, 2]) == found).all()


def test_a_bond_or_an_atom_changes_the_neighbourhoods_that_hold_it():
    atoms, bonds = dict.fromkeys(range(5), 6), {(i, i + 1): 1 for i in range(4)}
    found = bits(atoms, bonds)
    # Radius 0: a carbon; 1: the other end, the middle; 2: the other end, the atom next to it.
    assert (bits(atoms, bonds | {(0, 1): 2}) & found).sum() == 5
    assert (bits(atoms | {0: 8}, bonds) & found).sum() == 5
