"""Findings about memory, and about the graphs that do not fit."""

from statistics import geometric_mean

from report.claims.claim import NOT_RECORDED, Finding, Verdict, of_all
from report.claims.evidence import Evidence
from report.claims.ratios import SUBJECT, Find
from report.frames import HUGE, latest
from report.paper import DIM
from report.published_codes import DEVICE, code_times

A30_GIB = 24  # memory of the paper's smaller GPU, NVIDIA's data sheet


def runs_out(e: Evidence) -> Finding:
    """FlashSparse and PyG run out of memory on AmazonProducts, Fused3S and DF-GNN tiling do not."""
    found = {name: e.status("amazon-products", name) for name in ("flashsparse_naive", "pyg", SUBJECT, "dfgnn_tiling")}
    if not all(found.values()):
        return NOT_RECORDED
    fails = {"flashsparse_naive": True, "pyg": True, SUBJECT: False, "dfgnn_tiling": False}
    holds = [("oom" in found[name]) == fail for name, fail in fails.items()]
    text = ", ".join(f"{name}: {' and '.join(sorted(statuses))}" for name, statuses in found.items())
    rows = e.rows[(e.rows["metric"] == "peak_memory") & (e.rows["dataset"] == "amazon-products")]
    most = latest(rows[rows["value"].notna()], "series", "dim").groupby("series")["value"].max() / 1024
    needs = (
        f" `flashsparse_naive` needs up to {most['flashsparse_naive']:.1f} GiB." if "flashsparse_naive" in most else ""
    )
    why = f"Kernels at all d on a GPU of more memory than the A30 ({A30_GIB} GB), synthetic graph.{needs}"
    return Finding(of_all(sum(holds), len(holds)), why, ours=text)


def memory_on(dataset: str) -> Find:
    """Fused kernels need less memory than unfused ones."""

    def find(e: Evidence) -> Finding:
        found = e.memory(dataset)
        unfused = [
            found[name] for name in ("flashsparse_naive", "flashsparse_stable", "csr_unfused", "pyg") if name in found
        ]
        if SUBJECT not in found or not unfused:
            return NOT_RECORDED
        names = (SUBJECT, "dfgnn_tiling", "fused3s", "csr_unfused", "flashsparse_naive", "pyg")
        text = ", ".join(f"{name} {found[name]:.1f}" for name in names if name in found)
        out = [name for name in names if name not in found and "oom" in e.status(dataset, name, DIM)]
        text += " GiB" + (f"; out of memory: {', '.join(out)}" if out else "")
        verdict = Verdict.REPRODUCED if found[SUBJECT] < min(unfused) else Verdict.NOT
        return Finding(
            verdict, f"Peak memory of one run with its inputs and format, d = {DIM}, synthetic graph.", ours=text
        )

    return find


def less_than_dfgnn(e: Evidence) -> Finding:
    """Memory of Fused3S against DF-GNN on every graph and width."""
    rows = e.rows[
        (e.rows["bench"] == "kernels") & (e.rows["metric"] == "peak_memory") & (e.rows["out_dtype"] == "float32")
    ]
    rows = latest(
        rows[rows["value"].notna() & rows["series"].isin([SUBJECT, "dfgnn_tiling"])], "graph", "dim", "series"
    )
    wide = rows.pivot(index=["graph", "dim"], columns="series", values="value")
    if not {SUBJECT, "dfgnn_tiling"} <= {*wide.columns}:
        return NOT_RECORDED
    ratios = (wide[SUBJECT] / wide["dfgnn_tiling"]).dropna()
    text = f"{geometric_mean(ratios):.2f} of DF-GNN tiling's memory, {ratios.min():.2f} to {ratios.max():.2f}"
    return Finding(
        of_all(int((ratios < 1).sum()), len(ratios)),
        f"{len(ratios)} pairs of a graph and a d, inputs and format included.",
        ours=text,
    )


def hyper_fails(*datasets: str) -> Find:
    """DF-GNN hyper does not run on graphs of high degree."""

    def find(e: Evidence) -> Finding:
        panel = e.panel("single")
        if not panel or "dfgnn_hyper" not in panel.series:
            return NOT_RECORDED
        refused = [graph.dataset for graph in panel.graphs if panel.status(graph, "dfgnn_hyper") not in (None, "ok")]
        holds = sum(name in refused for name in datasets)
        more = [name for name in refused if name not in datasets]
        others = f" It also fails on {', '.join(more)}." if more else ""
        why = f"Ours refuses a graph whose longest rows do not fit 48 KB of shared memory.{others}"
        named = [name for name in refused if name in datasets]
        ours = f"fails on {' and '.join(named) or 'none of them'}"
        return Finding(of_all(holds, len(datasets)), why, _codes_without("dfgnn_hyper", e), ours)

    return find


def _codes_without(backend: str, e: Evidence) -> str:
    """Graphs on which the authors' code of a baseline does not run."""
    times = code_times()[DIM, backend]
    missing = times.index.get_level_values("dataset")[times.isna()]
    return f"fails on {', '.join(missing)}" if e.device == DEVICE else "-"


def only_fused_runs(e: Evidence) -> Finding:
    """On the two largest graphs only Fused3S runs."""
    rows = e.rows[(e.rows["bench"] == "kernels") & (e.rows["metric"] == "time") & e.rows["dataset"].isin(HUGE)]
    rows = rows[(rows["launch"] != "isolated") & (rows["plan"] != "rebuilt")]
    rows = latest(rows, "dataset", "series", "dim", "out_dtype")
    if rows.empty:
        return NOT_RECORDED
    ok = rows[rows["status"] == "ok"]
    texts, alone = [], []
    for dataset, found in rows.groupby("dataset"):
        runs = ok[ok["dataset"] == dataset]
        dims = ", ".join(map(str, sorted({*found["dim"]})))
        texts.append(
            f"{dataset} (d = {dims}): {', '.join(sorted({*runs['series']})) or 'none'} of {found['series'].nunique()}"
        )
        ours = runs["series"].str.startswith(("fused3s", "F3S_"))
        alone.append(bool(ours.any()) and not runs.loc[~ours, "series"].size)
    runs = {dataset for dataset in HUGE if (ok["dataset"].eq(dataset) & ok["series"].str.startswith("fused3s")).any()}
    verdict = (
        of_all(sum(alone), len(HUGE)) if all(alone) else Verdict.IN_PART if len(runs) == len(HUGE) else Verdict.NOT
    )
    synthetic = " Synthetic graphs of their size." if rows["data_source"].eq("synthetic").any() else ""
    why = f"Backends that run at the widths that fit one {e.device}.{synthetic}"
    return Finding(verdict, why, ours="; ".join(texts))
