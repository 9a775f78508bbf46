"""How long a kept stand-in takes to load, beside the time of reading its bytes."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from data.loader import find_graph, load
from data.registry.entry import Dataset
from data.synthetic.generate import kept_file


def time_loading(entry: Dataset, root: Path, seed: int, repeats: int) -> dict[str, str]:
    """Medians over `repeats` rounds, each of all four in turn, with the file in the system's cache.

    Returns:
        read_s: reading the file's bytes.
        edges_s: checked arrays of the edges.
        graph_s: the DGLGraph without features.
        load_s: the DGLGraph with random features.

    Raises:
        ValueError: stand-ins of this size are not kept.
    """
    path = kept_file(entry, root, entry.num_graphs or 1024, seed)
    if path is None:
        raise ValueError(f"name: got {entry.name!r}; its stand-in is too small to be kept, so that nothing is loaded")
    options = {"root": root, "source": "synthetic", "seed": seed}
    edges = load(entry.name, **options, features=False).meta.num_edges  # makes the file, and imports DGL
    steps: dict[str, Callable[[], object]] = {
        "read_s": path.read_bytes,
        "edges_s": lambda: find_graph(entry.name, **options),
        "graph_s": lambda: load(entry.name, **options, features=False),
        "load_s": lambda: load(entry.name, **options),
    }
    seconds: dict[str, list[float]] = {step: [] for step in steps}
    for _ in range(repeats):
        for step, call in steps.items():
            start = time.perf_counter()
            result = call()
            seconds[step].append(time.perf_counter() - start)
            del result  # its memory goes back outside the timed region
    middle = {step: median(times) for step, times in seconds.items()}
    return {
        "dataset": entry.name,
        "source": "synthetic",
        "edges": str(edges),
        "file_bytes": str(path.stat().st_size),
        **{step: f"{value:.3f}" for step, value in middle.items()},
        "graph_over_read": f"{middle['graph_s'] / middle['read_s']:.2f}",
        "load_over_read": f"{middle['load_s'] / middle['read_s']:.2f}",
        "repeats": str(repeats),
        "cores": str(os.cpu_count()),
    }
