"""Findings about the bandwidth of memory."""

from statistics import geometric_mean

from report.bandwidth import BANDWIDTH, bytes_moved, share
from report.claims.claim import NOT_RECORDED, Finding, near, of_all
from report.claims.evidence import Evidence
from report.claims.ratios import GROUPS, SUBJECT
from report.gather_model import PeakRates, achieved
from report.paper import DIM, published_times
from report.published_codes import DEVICE, code_times


def bandwidth_bound(e: Evidence) -> Finding:
    """Whether the paper's kernel is nearer to the bandwidth than to the rate of the tensor cores."""
    rates, cells = PeakRates.of(e.rows, e.device), achieved(e.rows)
    cells = cells[(cells["series"] == SUBJECT) & (cells["dim"] == DIM) & (cells["out_dtype"] == "float32")]
    cells = cells[cells["device"] == e.device]
    if cells.empty or rates.mma is None or e.device not in BANDWIDTH:
        return NOT_RECORDED
    memory = cells["tb_per_s"] / BANDWIDTH[e.device]
    tensor = cells["tflop_per_s"] / (rates.mma / 1e9)
    why = f"Shares of {BANDWIDTH[e.device]} TB/s and of the measured mma.sync rate ({rates.mma / 1e9:.0f} TFLOP/s) by "
    why += f"`{SUBJECT}`, d = {DIM}. Reproduced: nearer to the bandwidth on every graph."
    text = f"bandwidth {memory.min():.0%} to {memory.max():.0%}, tensor cores {tensor.min():.1%} to {tensor.max():.1%}"
    return Finding(of_all(int((memory > tensor).sum()), len(cells)), why, ours=f"{text} (n = {len(cells)})")


def share_of_bandwidth(e: Evidence) -> Finding:
    """The paper's kernel uses as much of its machine's bandwidth as ours; over the paper's real graphs."""
    if e.device not in BANDWIDTH:
        return NOT_RECORDED
    moved = bytes_moved(e.rows, e.device, DIM)
    codes = code_times()[DIM, SUBJECT].droplevel(["dataset", "kind", "nnz"]) if e.device == DEVICE else {}
    ours, published, theirs = {}, {}, {}  # shares by the hash of the edges
    for panel in filter(None, map(e.panel, GROUPS)):
        for graph in panel.graphs:
            time, gh200 = panel.time(graph, SUBJECT), published_times("GH200").get((graph.dataset, SUBJECT))
            if graph.real and graph in moved and time and gh200:
                ours[graph.sha256] = share(moved[graph], time, e.device)
                published[graph.sha256] = share(moved[graph], gh200, "GH200")
                if graph.sha256 in codes:
                    theirs[graph.sha256] = share(moved[graph], codes[graph.sha256], e.device)
    if not ours:
        return NOT_RECORDED
    mine, stated = geometric_mean(ours.values()), geometric_mean(published.values())
    text = f"{mine:.0%} of {BANDWIDTH[e.device]} TB/s (n = {len(ours)}, real)"
    why = f"The published GH200 times amount to {stated:.0%} of {BANDWIDTH['GH200']:g} TB/s on the same graphs (means)."
    code = f"{geometric_mean(theirs.values()):.0%} (n = {len(theirs)}, real)" if theirs else "-"
    return Finding(near(mine / stated, 1.0), why, code, text)
