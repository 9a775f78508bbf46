"""Score of a random forest on fingerprints of molecules, to put beside that of `scripts/train.py` on the same split.

    python scripts/fingerprints.py --config configs/train/b3db.yaml [--set section.key=value ...] [--seeds 5]

Fingerprints as of Rogers and Hahn (2010, ECFP4), with the data set's codes of atoms and bonds for their invariants: of
each atom the neighbourhoods of radius 0, 1 and 2 set one of 2,048 bits each. The forest has 500 trees and runs on the
CPU. Prints a line a seed, which --output also appends to a CSV. Exit status: 0; 2 for any error.
"""

import sys
from pathlib import Path
from typing import Annotated

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import numpy as np
import pandas as pd
import torch
import typer
from rich.text import Text
from sklearn.ensemble import RandomForestClassifier

import data
from common import cli
from common.cli import console
from common.provenance import provenance
from configs import TrainConfig, load_config
from data import LoadedGraph
from models.metrics import labels_of, score

BITS, RADIUS, TREES = 2_048, 2, 500

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration of a training on molecules with classes.")],
    overrides: cli.Overrides = None,
    seeds: Annotated[int, typer.Option(help="Forests, of the seeds 0, 1, ...", min=1)] = 5,
    output: Annotated[Path | None, typer.Option(help="CSV to append to.")] = None,
) -> None:
    """Score a random forest on fingerprints of molecules."""
    cli.configure_logging("data")
    with cli.user_errors():
        settings = load_config(config, overrides or [], schema=TrainConfig)
        loaded = data.load(**settings.load_arguments() | {"edge_features": True, "random_walk": 0})
        labels, metric = labels_of(loaded)
        if metric != "rocauc" or labels.shape[1:] != (1,) or loaded.splits is None:
            raise ValueError(f"{settings.data.name}: molecules with one answer each, and a split, are needed")
        bits, here = fingerprints(loaded), provenance(torch.device("cpu"))
        train = loaded.splits["train"]
        for seed in range(seeds):
            forest = RandomForestClassifier(TREES, random_state=seed, n_jobs=-1)
            forest.fit(bits[train], labels[train, 0].numpy())
            row = {"dataset": settings.data.name, "seed": seed}
            for part in ("valid", "test"):
                ids = loaded.splits[part]
                answer = torch.from_numpy(forest.predict_proba(bits[ids])[:, 1:])
                row[f"{part}_{metric}"] = round(score(metric, answer, labels[ids]), 4)
            console.print(Text(", ".join(f"{name} {value}" for name, value in row.items())))
            if output:
                row |= {name: here[name] for name in ("date", "commit", "python")}
                pd.DataFrame([row]).to_csv(output, mode="a", header=not output.exists(), index=False)


def fingerprints(loaded: LoadedGraph) -> np.ndarray:
    """[G, BITS] bool."""
    sizes, columns = loaded.graph_sizes.numpy(), loaded.columns.numpy()
    target = np.repeat(np.arange(sizes.sum()), np.diff(loaded.row_pointers.numpy()))
    bond = mixed(loaded.edge_data["feat"].numpy())
    graph = np.repeat(np.arange(sizes.size), sizes)
    found = np.zeros((sizes.size, BITS), bool)
    atom = mixed(loaded.node_data["feat"].numpy())
    for radius in range(RADIUS + 1):
        found[graph, atom % BITS] = True
        if radius < RADIUS:
            around = np.zeros_like(atom)
            np.add.at(around, target, mixed(np.stack([bond, atom[columns]], 1)))  # the order does not matter
            atom = mixed(np.stack([atom, around], 1))
    return found


def mixed(rows: np.ndarray) -> np.ndarray:
    """A hash of each row of integers [n, C], [n] uint64: steps of splitmix64."""
    state = np.zeros(len(rows), np.uint64)
    for column in rows.T:
        state = state * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64) + np.uint64(1)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


if __name__ == "__main__":
    app()
