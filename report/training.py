"""Scores of trained models over seeds (benchmarks `train` and `infer`), as lines of RESULTS.md."""

from math import hypot
from statistics import fmean, stdev

import pandas as pd

from report.engine import Data, markdown

RUN = ["label", "data_sha256", "device", "dim", "heads", "blocks", "recipe", "backend", "dtype"]


def standard_error(values: pd.Series) -> float:
    """Of the mean; 0 for one value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def tested(data: Data, bench: str) -> pd.DataFrame:
    """Metrics on the test split of weights in a file, on all GPUs."""
    metrics = [name for name in data.benches.get(bench, data.empty)["metric"].unique() if name.startswith("test_")]
    of_files = {"checkpoint": {"not": ["none"]}, "device": {"not": ["none"]}, "status": "unchecked"}
    return data.pick(of_files | {"bench": bench, "metric": metrics})


def last_of_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """One row of each seed of a model, the last: it may have been trained again, in another folder or on more GPUs."""
    return rows.drop_duplicates([*RUN, "variant", "metric"], keep="last")  # rows of a model are in the order of time


def split_scores(data: Data) -> str:
    """The mean metric over seeds, and its difference from `reference` in float32: of the means, and seed by seed."""
    found = {key: rows.set_index("variant") for key, rows in last_of_seeds(tested(data, "train")).groupby(RUN)}
    lines = []
    for key, rows in sorted(found.items()):
        label, edges, device, dim, heads, blocks, recipe, backend, dtype = key
        scores, exact, over = rows["value"], found.get((*key[:7], "reference", "float32")), ["-", "-"]
        if exact is not None and exact is not rows:
            exact = exact["value"]
            error = hypot(standard_error(scores), standard_error(exact))
            paired = (scores - exact).dropna()
            over[0] = f"{fmean(scores) - fmean(exact):+z.4f} ± {error:.4f}"
            if len(paired):
                over[1] = f"{fmean(paired):+z.4f} ± {standard_error(paired):.4f} (n = {len(paired)})"
        gpu, layers = device.removeprefix("NVIDIA ").split()[0], f"{blocks} x {heads} heads of {dim // heads}"
        line = [label, gpu, layers, f"`{recipe[:4]}`, `{edges[:4]}`", f"{backend}, {dtype}", rows["metric"].iloc[0][5:]]
        error = f" ± {standard_error(scores):.4f}" * (len(scores) > 1)
        lines.append([*line, str(len(scores)), f"{fmean(scores):.4f}{error}", *over])
    head = ["data set", "device", "layers", "recipe, edges", "attention", "metric", "seeds", "mean"]
    return markdown([*head, "minus `reference`, float32", "the same, paired by seed"], lines, 6) if lines else ""


def inference_changes(data: Data) -> str:
    """How much the metric of the same weights changes in inference with another attention or precision; a sentence."""
    trained, used = tested(data, "train"), tested(data, "infer")
    weights = ["dataset", "checkpoint", "metric"]
    last = trained.sort_values("date", kind="stable").drop_duplicates(weights, keep="last")  # of models of any size
    pairs = used.merge(last, on=weights, suffixes=("", "_trained"))
    pairs = pairs[pairs["date"] >= pairs["date_trained"]]  # else the file was written anew since
    pairs = pairs[(pairs["backend"] != pairs["backend_trained"]) | (pairs["dtype"] != pairs["dtype_trained"])]
    pairs = pairs.assign(change=pairs["value"] - pairs["value_trained"])
    ways = ["label", "backend_trained", "dtype_trained", "backend", "dtype"]
    means = {key: found["change"] for key, found in pairs.groupby(ways)}
    if not means:
        return "Inference with the same weights was not recorded."
    (label, *way), changes = max(means.items(), key=lambda item: abs(fmean(item[1])))
    names = f"{label}, trained with {way[0]} in {way[1]}, {way[2]} in {way[3]}"
    change = f"{fmean(changes):+z.5f} ± {standard_error(changes):.5f} over {len(changes)} seeds"
    ways = f"Inference of the same weights with another attention or precision, {len(means)} ways"
    return f"{ways}: the mean score changes by at most {change} ({names})."
