"""Tables of plans and of whole collections, from rows written by hand."""

from kernel_rows import row

from report.frames import frame
from report.tables.plans import plan_tables


def plan(dataset, variant, ms, status="unchecked", **changes):
    same = {"bench": "plans", "scope": "build", "plan": "rebuilt", "launch": "none", "l2": "none"} | changes
    return row(dataset, "fused3s", ms, status, variant=variant, **same)


def whole(metric, value, **changes):
    same = {"bench": "infer", "scope": "model", "region": "all batches", "blocks": 10, "dense": "fused"}
    same["launch"] = "eager"
    return row("ogbg-molhiv", "fused3s", value, metric=metric, graphs=41_120, **same, **changes)


def test_a_line_for_each_graph_and_a_table_for_each_shape():
    rows = [
        plan("pubmed", "plan", 0.3),
        plan("cora", "plan", 9.0),
        plan("cora", "plan", 0.2),  # supersedes the one before it
        plan("cora", "plan_backward", 0.25),
        plan("cora", "plan_and_run", None, "oom", scope="attention"),
        plan("cora", "plan", 0.4, heads=8, dim=16),
    ]
    text = plan_tables(frame(rows))
    one, eight = text.split("## ")[1:]
    assert one.startswith("Plans of `fused3s`, heads x columns 1x128, NVIDIA H200")
    lines = [line for line in one.splitlines() if line.startswith("| ")]
    assert lines[2:] == ["| cora | 10,556 | 0.200 | 0.250 | oom |", "| pubmed | 88,651 | 0.300 | - | - |"]
    assert "8x16" in eight.splitlines()[0]
    assert "| cora | 10,556 | 0.400 | - | - |" in eight


def test_whole_collections_of_a_gpu():
    rows = [
        whole("throughput", 700_000.0, unit="graphs/s", note="41 batches of 1,024, kept on cuda"),
        whole("share_in_forward_passes", 0.853),
        whole("time", 1.25),
        whole("throughput", 5.0, unit="graphs/s", device_type="cpu", device="a CPU"),
    ]
    text = plan_tables(frame(rows))
    assert text.count("\n## ") == 1
    assert (
        "| ogbg-molhiv | 41,120 | 10 blocks, d = 128, 1 head, float16, fused | eager | fused3s | 700,000 | 85.3% | "
        "1.250 | 41 batches of 1,024, kept on cuda |"
    ) in text


def test_nothing_without_rows():
    assert "\n## " not in plan_tables(frame([row("cora", "fused3s", 1.0)]))
