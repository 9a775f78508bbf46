"""Findings about kernel times: the captions of the kernel figures, and what the text says about them."""

from statistics import geometric_mean

import pandas as pd

from report.claims.claim import NOT_RECORDED, Finding, Verdict, near, of_all, together
from report.claims.evidence import Evidence
from report.claims.ratios import SUBJECT, WIDTHS, Find, in_words, judged, means, span
from report.paper import DIM, published_ratio, published_speedup, published_times, stated_means
from report.published_codes import DEVICE, LAUNCH_WORDS, code_times, codes_over_ours, ratio

BASELINES = ("dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable", "pyg")
CODE_KINDS = {"single": "single", "batched": "molecules"}  # graphs of the authors' codes by group of the paper
ALIKE = 1.05  # factor between two times that count as the same


def kernel_speedup(group: str, baseline: str, value: float) -> Find:
    """A caption of the kernel figures."""

    def find(e: Evidence) -> Finding:
        panel = e.panel(group)
        speedup = panel and panel.speedup(SUBJECT, baseline)
        if not speedup:
            return NOT_RECORDED
        verdicts, published = judged(speedup, value), "-"
        if theirs := code_speedup(e, group, baseline):
            verdicts = {"the authors' codes": near(theirs[0], value)} | verdicts
            published = f"{theirs[0]:.2f}x (n = {theirs[1]}, real)"
        why = f"{in_words(verdicts)} {_rewritten(e, group, baseline)}"
        return Finding(together(verdicts.values()), why, published, means(speedup))

    return find


def _rewritten(e: Evidence, group: str, baseline: str) -> str:
    """How much faster our form of a baseline is than the authors' code, or than its published times."""
    if e.device == DEVICE and baseline in code_times()[DIM]:
        ratios = codes_over_ours(e.rows, DIM, baseline, baseline)
        ratios = ratios[ratios.index.get_level_values("kind") == CODE_KINDS[group]].dropna()
        source = "the authors' code on the same graphs"
    else:
        panel = e.panel(group)
        pairs = ((graph, panel.time(graph, baseline)) for graph in panel.graphs)
        ratios = [published_ratio("GH200", graph.dataset, baseline, time) for graph, time in pairs]
        ratios, source = pd.Series(ratios, dtype=float).dropna(), "the times published for a GH200"
    return f"Our `{baseline}` is {geometric_mean(ratios):.2f} times as fast as {source}." if len(ratios) else ""


def code_speedup(e: Evidence, group: str, baseline: str) -> tuple[float, int] | None:
    """The authors' baseline over the authors' Fused3S on our GPU, and the number of graphs."""
    times = code_times()[DIM]
    return ratio(times, SUBJECT, baseline, CODE_KINDS[group]) if e.device == DEVICE else None


def kernel_range(e: Evidence) -> Finding:
    """The abstract's range over all baselines and both groups."""
    stated = {(m.group, m.baseline): m.low for m in stated_means() if m.gpu == "H100" and m.subject == SUBJECT}
    ours, real, theirs, verdicts, agree = [], [], [], [], 0
    for group in CODE_KINDS:
        for baseline in BASELINES:
            finding = kernel_speedup(group, baseline, stated[group, baseline])(e)
            if finding is NOT_RECORDED:
                continue
            verdicts.append(finding.verdict)
            speedup = e.panel(group).speedup(SUBJECT, baseline)
            ours.append(speedup.mean)
            real += [speedup.real.mean] if speedup.real else []
            if code := code_speedup(e, group, baseline):
                theirs.append(code[0])
                agree += near(code[0], stated[group, baseline]) is Verdict.REPRODUCED
    if not ours:
        return NOT_RECORDED
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in Verdict if v in verdicts)
    text = f"{span(ours)}; real graphs {span(real)}" if real else span(ours)
    why = f"Of the {len(verdicts)} means of the captions: {counts}."
    if theirs:
        why += f" The authors' codes agree with {agree} of the {len(theirs)} means that were measured with them."
    published = f"{span(theirs)} over three baselines, real graphs" if theirs else "-"
    return Finding(together(verdicts), why, published, text)


def outperforms_all(e: Evidence) -> Finding:
    """Counts pairs of a graph and a baseline."""
    pairs = faster = 0
    for group in CODE_KINDS:
        for baseline in BASELINES:
            panel = e.panel(group)
            speedup = panel and panel.speedup(SUBJECT, baseline)
            pairs += len(speedup.ratios) if speedup else 0
            faster += sum(ratio > 1 for ratio in speedup.ratios.values()) if speedup else 0
    if not pairs:
        return NOT_RECORDED
    published = "-"
    if e.device == DEVICE:
        times = code_times()[DIM]
        ratios = times[[name for name in BASELINES if name in times]].div(times[SUBJECT], axis=0).stack()
        published = f"faster in {(ratios > 1).sum()} of {len(ratios)} pairs"
    gh200 = published_times("GH200")
    lost = [
        f"{name} ({base})" for (name, base), time in gh200.items() if base in BASELINES and time < gh200[name, SUBJECT]
    ]
    why = f"Pairs of a graph and a baseline, d = {DIM}. The authors' own GH200 times are slower on: {', '.join(lost)}."
    return Finding(of_all(faster, pairs), why, published, f"faster in {faster} of {pairs} pairs")


def matches_published_kernel(e: Evidence) -> Finding:
    """Our `fused3s_paper` against the authors' Fused3S on the same GPU and graphs."""
    if e.device != DEVICE:
        return NOT_RECORDED
    texts, slower, total = [], [], 0
    for dim in WIDTHS:
        ratios = codes_over_ours(e.rows, dim, SUBJECT, SUBJECT).dropna()
        if len(ratios):
            total += len(ratios)
            texts.append(f"d = {dim}: {geometric_mean(ratios):.2f}x (n = {len(ratios)})")
            slower += [f"{name} (d = {dim})" for (_, name, _, _), one in ratios.items() if one < 1 / ALIKE]
    if not texts:
        return NOT_RECORDED
    behind = f"slower on {', '.join(slower)}" if slower else "not slower on any graph and d"
    how = f"the authors' kernel over ours on the same graphs ({LAUNCH_WORDS})"
    why = f"Time of {how}; by more than 5 %, ours is {behind}."
    return Finding(of_all(total - len(slower), total), why, ours="; ".join(texts))


def codes_available(e: Evidence) -> Finding:
    """Which baselines were measured as the authors' own codes on our GPU."""
    if e.device != DEVICE:
        return NOT_RECORDED
    times = code_times()[DIM]
    found = [name for name in BASELINES if name in times]
    theirs = ", ".join(f"{name} on {times[name].notna().sum()} graphs" for name in found)
    why = "All figures rest on baselines written anew, with right results; the authors' codes are timed beside them."
    return Finding(of_all(len(found), len(BASELINES)), why, theirs, ", ".join(BASELINES))


def order_of(group: str, faster: str, slower: str, says: str) -> Find:
    """One baseline is faster than another."""

    def find(e: Evidence) -> Finding:
        panel = e.panel(group)
        speedup = panel and panel.speedup(faster, slower)
        if not speedup:
            return NOT_RECORDED
        theirs = published_speedup("GH200", group, faster, slower)
        verdict = Verdict.REPRODUCED if speedup.mean > 1.1 else Verdict.IN_PART if speedup.mean > 1 else Verdict.NOT
        why = f"{says} The published GH200 times: {theirs[0]:.2f}x. Reproduced: above 1.1x."
        return Finding(verdict, why, ours=means(speedup))

    return find


def hyper_or_tiling(e: Evidence) -> Finding:
    """DF-GNN hyper is ahead of tiling on small graphs and behind on large ones (a million edges and more)."""
    panel = e.panel("single")
    speedup = panel and panel.speedup("dfgnn_hyper", "dfgnn_tiling")
    if not speedup:
        return NOT_RECORDED
    small = [one > 1 for graph, one in speedup.ratios.items() if graph.nnz < 1e6]
    large = [one < 1 for graph, one in speedup.ratios.items() if graph.nnz >= 1e6]
    text = f"ahead on {sum(small)} of {len(small)} small graphs, behind on {sum(large)} of {len(large)} large ones"
    why = "Large: a million edges or more, where hyper runs at all."
    return Finding(of_all(sum(small) + sum(large), len(small) + len(large)), why, ours=text)


def less_over_hyper_on_batches(e: Evidence) -> Finding:
    """The speed-up over DF-GNN hyper is smaller on batches than on single graphs."""
    panels = [e.panel(group) for group in CODE_KINDS]
    found = [panel and panel.speedup(SUBJECT, "dfgnn_hyper") for panel in panels]
    if not all(found):
        return NOT_RECORDED
    single, batched = found
    published = "-"
    if e.device == DEVICE:
        theirs = [code_speedup(e, group, "dfgnn_hyper") for group in CODE_KINDS]
        published = f"{theirs[0][0]:.2f}x (n = {theirs[0][1]}) and {theirs[1][0]:.2f}x (n = {theirs[1][1]})"
    verdict = Verdict.REPRODUCED if batched.mean < single.mean else Verdict.NOT
    ours = f"{single.mean:.2f}x (n = {len(single.ratios)}) and {batched.mean:.2f}x (n = {len(batched.ratios)})"
    return Finding(verdict, "On single graphs and on batches. Reproduced: less on batches.", published, ours)


def limited_on(*datasets: str) -> Find:
    """The speed-up over FlashSparse is below its mean on irregular graphs."""

    def find(e: Evidence) -> Finding:
        panel = e.panel("single")
        speedup = panel and panel.speedup(SUBJECT, "flashsparse_naive")
        found = {g.dataset: one for g, one in speedup.ratios.items() if g.dataset in datasets} if speedup else {}
        if not found:
            return NOT_RECORDED
        text = ", ".join(f"{name} {one:.2f}x" for name, one in found.items())
        why = (
            f"Over `flashsparse_naive`, whose mean over all single graphs is {speedup.mean:.2f}x; reproduced: below it."
        )
        return Finding(of_all(sum(one < speedup.mean for one in found.values()), len(found)), why, ours=text)

    return find


def split_windows(e: Evidence) -> Finding:
    """Several thread blocks for a heavy window, as `fused3s` has them, on the graphs that the paper names."""
    panel = e.panel("single")
    speedup = panel and panel.speedup("fused3s", SUBJECT)
    found = (
        {g.label: one for g, one in speedup.ratios.items() if g.dataset in ("musae-github", "blog")} if speedup else {}
    )
    if not found:
        return NOT_RECORDED
    verdict = of_all(sum(one > speedup.mean for one in found.values()), len(found))
    why = f"`fused3s` splits heavy windows over blocks; its mean over `{SUBJECT}` is {speedup.mean:.2f}x."
    return Finding(verdict, why, ours=", ".join(f"{label} {one:.1f}x" for label, one in found.items()))
