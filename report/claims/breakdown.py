"""Findings about the paper's performance breakdown: its ablation, and the balance of the SMs."""

from statistics import geometric_mean

from report.claims.claim import NOT_RECORDED, Finding, Verdict, near, of_all, together
from report.claims.evidence import Evidence
from report.claims.ratios import GROUPS, SUBJECT, WIDTHS, Find, in_words, judged, means
from report.frames import latest
from report.paper import published_speedup, reordering_gains


def ablation_step(group: str, variant: str, before: str, low: float, high: float | None = None) -> Find:
    """A step of the paper's ablation at its head dimension."""

    def find(e: Evidence) -> Finding:
        panel = e.ablation(group)
        speedup = panel and panel.speedup(variant, before)
        if not speedup:
            return NOT_RECORDED
        verdicts = judged(speedup, low, high)
        published = {gpu: published_speedup(gpu, group, variant, before) for gpu in ("GH200", "A30")}
        times = ", ".join(f"{found[0]:.2f}x ({gpu})" for gpu, found in published.items() if found)
        why = f"{in_words(verdicts)} From the published times: {times}."
        return Finding(together(verdicts.values()), why, ours=means(speedup))

    return find


def split_by_width(e: Evidence) -> Finding:
    """Split columns over split rows at each head dimension: the paper makes split columns the default for all."""
    texts, ahead, total = [], 0, 0
    for group in GROUPS:
        for dim in WIDTHS:
            panel = e.ablation(group, dim)
            speedup = panel and panel.speedup("F3S_splitC", "F3S_splitR")
            if speedup:
                total += 1
                ahead += speedup.mean > 1
                texts.append(f"{group}, d = {dim}: {speedup.mean:.2f}x (n = {len(speedup.ratios)})")
    why = "Time of split rows over split columns; the verdict counts groups and widths at which columns are ahead."
    return Finding(of_all(ahead, total), why, ours="; ".join(texts)) if texts else NOT_RECORDED


def less_on_batches(e: Evidence) -> Finding:
    """The gain of split columns is smaller on batches than on single graphs."""
    panels = [e.ablation(group) for group in ("single", "batched")]
    found = [panel and panel.speedup("F3S_splitC", "F3S_splitR") for panel in panels]
    if not all(found):
        return NOT_RECORDED
    single, batched = found
    published = [published_speedup("GH200", group, "F3S_splitC", "F3S_splitR")[0] for group in ("single", "batched")]
    why = f"Published times on a GH200: {published[0]:.2f}x on single graphs, {published[1]:.2f}x on batches."
    verdict = Verdict.REPRODUCED if batched.mean < single.mean else Verdict.NOT
    return Finding(verdict, why, ours=f"{single.mean:.2f}x on single graphs, {batched.mean:.2f}x on batches")


def reordering(e: Evidence) -> Finding:
    """The gain on the graphs that gain, since the paper speaks of about half of them."""
    panel = e.ablation("single")
    speedup = panel and panel.speedup("F3S_reorderRW", "F3S_splitC")
    if not speedup:
        return NOT_RECORDED
    texts = {"ours": {graph.dataset: gain for graph, gain in speedup.ratios.items()}}
    texts |= {gpu: reordering_gains(gpu) for gpu in ("GH200", "A30")}
    words = {}
    for who, gains in texts.items():
        won = [gain for gain in gains.values() if gain > 1]
        mean = f"{geometric_mean(won):.2f}x on {len(won)} of {len(gains)}" if won else f"on none of {len(gains)}"
        words[who] = f"{mean}, {geometric_mean(gains.values()):.2f}x over all"
    won = [gain for gain in speedup.ratios.values() if gain > 1]
    verdict = near(geometric_mean(won), 1.18) if won else Verdict.NOT
    why = f"Mean over the graphs that gain. From the published times: {words['GH200']} (GH200); {words['A30']} (A30)."
    return Finding(verdict, why, ours=words["ours"])


def little_on_hubs(*datasets: str) -> Find:
    """Reordering gains little where a few windows hold most blocks: less than on the graphs that it helps most."""

    def find(e: Evidence) -> Finding:
        panel = e.ablation("single")
        speedup = panel and panel.speedup("F3S_reorderRW", "F3S_splitC")
        gains = {g.dataset: gain for g, gain in speedup.ratios.items() if g.dataset in datasets} if speedup else {}
        if not gains:
            return NOT_RECORDED
        best = max(speedup.ratios.values())
        text = ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items())
        why = f"Little: a gain below 1.1x. The largest gain is {best:.2f}x."
        return Finding(of_all(sum(gain < 1.1 for gain in gains.values()), len(gains)), why, ours=text)

    return find


def sm_active(dataset: str) -> Find:
    """Balance of the SMs with and without reordering, beside the authors' values."""

    def find(e: Evidence) -> Finding:
        rows = e.rows[(e.rows["metric"] == "sm_active_share") & (e.rows["status"] == "ok")]
        rows = latest(rows[(rows["dataset"] == dataset) & (rows["out_dtype"] == "float32")], "series")
        ours = dict(zip(rows["series"], rows["value"], strict=True))
        if not {"F3S_splitC", "F3S_reorderRW"} <= {*ours}:
            return NOT_RECORDED
        rises, even = ours["F3S_reorderRW"] > ours["F3S_splitC"], ours["F3S_reorderRW"] > 0.9
        synthetic = bool(rows["data_source"].eq("synthetic").any())
        order = " The synthetic graph's windows are in random order, not in Reddit's." if synthetic else ""
        why = f"Mean over longest active time of the SMs. Reproduced: it rises above 0.9.{order}"
        verdict = Verdict.REPRODUCED if rises and even else Verdict.IN_PART if rises else Verdict.NOT
        text = f"{ours['F3S_splitC']:.2f} to {ours['F3S_reorderRW']:.2f}{' (synthetic)' if synthetic else ''}"
        return Finding(verdict, why, ours=text)

    return find


def edge_parallel(e: Evidence) -> Finding:
    """Time of edge-parallel blocks over that of the paper's kernel, which is node-parallel and has the same loads."""
    panels = [e.panel(group) for group in GROUPS]
    found = {panel.group: panel.speedup(SUBJECT, "F3S_edgeParallel") for panel in panels if panel}
    found = {group: speedup for group, speedup in found.items() if speedup}
    if not found:
        return NOT_RECORDED
    ratios = [ratio for speedup in found.values() for ratio in speedup.ratios.values()]
    why = f"Time of edge-parallel blocks over `{SUBJECT}`. Reproduced: slower on every graph."
    text = "; ".join(f"{group}: {means(speedup)}" for group, speedup in found.items())
    return Finding(of_all(sum(ratio > 1 for ratio in ratios), len(ratios)), why, ours=text)
