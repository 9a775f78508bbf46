"""Claims of the abstract and introduction, and of the kernel, ablation, memory and end-to-end results."""

from report.claims import bandwidth, breakdown, formats, kernel_times, memory, model_times
from report.claims.claim import Claim, Section, by_test, out_of_scope
from report.paper import published_sm_active, stated_means

KERNELS = "make reproduce-figures FIGURES=kernels"
ABLATION = "make reproduce-figures FIGURES=ablation"
MODELS = "make reproduce-figures FIGURES=end_to_end"
MODELS_FP32 = "make reproduce-figures FIGURES=end_to_end_fp32"
SM_ACTIVE = "make reproduce-figures FIGURES=sm_active"
PREPROCESSING = "make reproduce-figures FIGURES=preprocessing"
DRAW = "make reproduce-figures FIGURES=none"
HUGE = "make reproduce-figures FIGURES=huge"
LIST = "python scripts/datasets.py list"

NO_A30 = (
    "No A30 was at hand; the authors' own A30 times are shown in figures/paper.md, and the kernels compile for sm_80."
)

HEADLINE = Section(
    "Headline claims",
    (
        Claim(
            "abstract, contribution 3",
            "The fused kernel is 1.6 to 16.3 times faster than DF-GNN, FlashSparse and PyG on an H100",
            (KERNELS,),
            kernel_times.kernel_range,
            "1.6x to 16.3x",
        ),
        Claim("abstract, contribution 3", "The same on an A30", (), out_of_scope(NO_A30), "1.5x to 14x"),
        Claim(
            "abstract, contribution 4",
            "Graph Transformer inference is 1.05 to 5.36 times faster end to end on an H100",
            (MODELS, MODELS_FP32),
            model_times.model_range,
            "1.05x to 5.36x",
        ),
        Claim(
            "abstract",
            "It outperforms all baselines on all data sets",
            (KERNELS,),
            kernel_times.outperforms_all,
            "every pair",
        ),
        Claim(
            "Algorithm 1, as code",
            "This repository's form of the paper's kernel is as fast as the authors' own",
            (KERNELS,),
            kernel_times.matches_published_kernel,
            "the authors' code",
        ),
        Claim(
            "published times",
            "The published times use as large a share of their GPU's bandwidth as ours of the H200's",
            (KERNELS,),
            bandwidth.share_of_bandwidth,
        ),
        Claim(
            "title, abstract",
            "SDDMM, softmax and SpMM are one kernel on tensor cores",
            ("tests/baselines/test_cuda_on_cpu_baselines.py::test_the_papers_kernel",),
            by_test("One launch of one kernel; no score is written to memory."),
        ),
        Claim(
            "contribution 2",
            "Fully on chip, blocks and warps share out the work, no synchronization through global memory",
            ("tests/baselines/test_cuda_on_cpu_baselines.py::test_the_papers_kernel",),
            by_test("A thread block per row window. `fused3s` departs from it: it splits heavy windows over blocks."),
        ),
        Claim(
            "contribution 4",
            "Integrated into the Graph Transformer on DGL",
            (
                "tests/models/test_graph_transformer.py::test_model_is_the_architecture_of_the_paper",
                "tests/models/test_execution.py::test_gpu_all_backends_and_executions_agree",
            ),
            by_test(
                "PyTorch modules that take a DGLGraph; DGL's own attention runs where DGL has it (its wheels: CPU)."
            ),
        ),
        Claim(
            "introduction",
            "The pattern recurs in graph networks, sparse transformers and models of dynamic sparsity",
            ("tests/models/test_agnn.py::test_equals_dgls_layer",),
            by_test(
                "Graph Transformer, AGNN, Longformer and BigBird masks run through one call; see the last section."
            ),
        ),
        Claim("contribution 1", "Open source", ("make test",), by_test("MIT licence.")),
    ),
)


def _captions(group: str) -> tuple[Claim, ...]:
    """The captions of the kernel figures on the H100."""
    claims = []
    for mean in stated_means():
        if (mean.gpu, mean.group, mean.subject) == ("H100", group, "fused3s_paper"):
            says = f"{mean.describe()} over {mean.baseline}, {group} graphs, H100"
            find = kernel_times.kernel_speedup(group, mean.baseline, mean.low)
            claims.append(Claim(mean.source, says, (KERNELS,), find, mean.describe()))
    return tuple(claims)


FIGURES = Section(
    "Kernel figures",
    (
        *_captions("single"),
        *_captions("batched"),
        Claim("Figure 5(b)", "Single graphs on an A30", (), out_of_scope(NO_A30), "2.7, 1.7, 1.5, 2.2, 12.3x"),
        Claim("Figure 6(b)", "Batches on an A30", (), out_of_scope(NO_A30), "4.3, 1.5, 1.9, 2.5, 14x"),
        Claim(
            "Figures 5 and 6",
            "Bars for each graph, ordered by edges, geometric means",
            (
                DRAW,
                "tests/report/test_figures.py::test_bars_are_ordered_by_edges_hatched_if_synthetic_and_say_why_they_are_missing",
                "tests/report/test_paper.py::test_every_caption_follows_from_the_published_times",
            ),
            by_test(
                "Drawn for d = 64, 128, 256. Peptides-func and -struct, the same molecules, count once and not twice."
            ),
        ),
        Claim(
            "3S kernel performance",
            "DF-GNN hyper fails on Reddit, AmazonProducts, Ogbn-products and IGB-medium",
            (KERNELS,),
            memory.hyper_fails("reddit", "amazon-products", "ogbn-products", "igb-medium"),
            "4 graphs",
        ),
        Claim(
            "3S kernel performance",
            "DF-GNN hyper is better on small graphs, tiling on large ones",
            (KERNELS,),
            kernel_times.hyper_or_tiling,
        ),
        Claim(
            "3S kernel performance",
            "FlashSparse with the naive softmax outperforms its stable one, on single graphs",
            (KERNELS,),
            kernel_times.order_of(
                "single",
                "flashsparse_naive",
                "flashsparse_stable",
                "Our stable softmax is fused into the two kernels; the authors' is a call of the framework.",
            ),
            "4.4 / 1.6",
        ),
        Claim(
            "3S kernel performance",
            "Limited speed-up on Blog, Yelp and Github, whose windows vary most",
            (KERNELS,),
            kernel_times.limited_on("blog", "yelp", "musae-github"),
        ),
        Claim(
            "3S kernel performance",
            "Several thread blocks for a row window could help them (future work)",
            (KERNELS,),
            kernel_times.split_windows,
        ),
        Claim(
            "3S kernel performance",
            "Batches are more regular, from which DF-GNN benefits: less speed-up over hyper",
            (KERNELS,),
            kernel_times.less_over_hyper_on_batches,
            "2.2x and 1.9x",
        ),
        Claim(
            "Baselines",
            "The baselines are the authors' own codes",
            (KERNELS, "tests/report/test_paper.py::test_the_papers_ratios_follow_from_the_authors_codes"),
            kernel_times.codes_available,
        ),
    ),
)


def _balance(dataset: str) -> str:
    """The authors' values of the figure of the SM active time."""
    shares = published_sm_active().loc[dataset]
    return f"{shares['F3S_splitC']:.2f} to {shares['F3S_reorderRW']:.2f} (A30)"


BREAKDOWN = Section(
    "Performance breakdown",
    (
        Claim(
            "warp partitioning",
            "Split columns are 1.5 times faster than split rows on single graphs",
            (ABLATION,),
            breakdown.ablation_step("single", "F3S_splitC", "F3S_splitR", 1.5),
            "1.5x",
        ),
        Claim(
            "warp partitioning",
            "Their gain is smaller on batches",
            (ABLATION,),
            breakdown.less_on_batches,
        ),
        Claim(
            "warp partitioning",
            "Split columns are the default; split rows lack parallelism at small d",
            (ABLATION,),
            breakdown.split_by_width,
        ),
        Claim(
            "row window reordering",
            "Reordering gains 1.18x on about half of the single graphs",
            (ABLATION,),
            breakdown.reordering,
            "1.18x on about half",
        ),
        Claim(
            "row window reordering",
            "It gains little on Github and Blog",
            (ABLATION,),
            breakdown.little_on_hubs("musae-github", "blog"),
        ),
        Claim(
            "load balancing",
            "Sorting the windows adds negligible overhead",
            (PREPROCESSING,),
            formats.sorting_cost,
            "negligible",
        ),
        Claim("load balancing", "Preprocessing is compaction and sorting", (PREPROCESSING,), formats.preprocessing),
        Claim(
            "permuting Q, K and V",
            "Wide loads gain 1.19 to 1.39x on single graphs",
            (ABLATION,),
            breakdown.ablation_step("single", "F3S_permuteQKV", "F3S_reorderRW", 1.19, 1.39),
            "1.19x to 1.39x",
        ),
        Claim(
            "permuting Q, K and V",
            "Wide loads gain 1.16 to 1.25x on batches",
            (ABLATION,),
            breakdown.ablation_step("batched", "F3S_permuteQKV", "F3S_reorderRW", 1.16, 1.25),
            "1.16x to 1.25x",
        ),
        Claim(
            "performance breakdown",
            "The variants differ by one optimization at a time",
            ("tests/configs/test_bench.py::test_each_variant_is_one_switch_from_the_one_before",),
            by_test(
                "One template. The authors' plot script swaps the labels of rows and columns ([how](paper/README.md))."
            ),
        ),
        Claim(
            "Figure 7",
            "SMs are busy evenly with reordering: Pubmed",
            (SM_ACTIVE,),
            breakdown.sm_active("pubmed"),
            _balance("pubmed"),
        ),
        Claim(
            "Figure 7",
            "SMs are busy evenly with reordering: Reddit",
            (SM_ACTIVE,),
            breakdown.sm_active("reddit"),
            _balance("reddit"),
        ),
        Claim(
            "fusion, Figure 2",
            "Edge-parallel blocks are slower than node-parallel ones",
            (ABLATION, "tests/baselines/test_cuda_on_cpu_baselines.py::test_windows_split_over_edge_parallel_blocks"),
            breakdown.edge_parallel,
            "about 1.2x for SpMM alone",
        ),
        Claim("data layout", "Sparse attention is bound by memory bandwidth", (KERNELS,), bandwidth.bandwidth_bound),
    ),
)

MEMORY = Section(
    "Memory and scale",
    (
        Claim(
            "3S kernel performance",
            "FlashSparse and PyG run out of memory on AmazonProducts; Fused3S and DF-GNN tiling do not (A30)",
            (KERNELS,),
            memory.runs_out,
        ),
        Claim(
            "3S kernel performance",
            "Fused kernels reduce the memory needed: AmazonProducts",
            (KERNELS,),
            memory.memory_on("amazon-products"),
        ),
        Claim(
            "3S kernel performance",
            "Fused kernels reduce the memory needed: Reddit",
            (KERNELS,),
            memory.memory_on("reddit"),
        ),
        Claim(
            "3S kernel performance",
            "Fused3S takes less memory than DF-GNN",
            (KERNELS,),
            memory.less_than_dfgnn,
        ),
        Claim(
            "3S kernel performance",
            "Only Fused3S runs on IGB-large and Ogbn-papers100M (H100)",
            (HUGE,),
            memory.only_fused_runs,
        ),
        Claim(
            "stability",
            "Online softmax scales to large graphs",
            (KERNELS,),
            memory.memory_on("ogbn-products"),
        ),
    ),
)


def _model_captions() -> tuple[Claim, ...]:
    claims = []
    for mean in stated_means():
        if (mean.gpu, mean.group) == ("H100", "model"):
            says = f"{mean.describe()} over {mean.baseline}, whole model, H100"
            find = model_times.model_ratio(mean.baseline, mean.low)
            claims.append(Claim(mean.source, says, (MODELS, MODELS_FP32), find, mean.describe()))
    return tuple(claims)


MODEL = Section(
    "End to end",
    (
        *_model_captions(),
        Claim("Figure 8(a)", "The same on an A30", (), out_of_scope(NO_A30), "1.55, 1.29, 1.10, 3.08x"),
        Claim("Figure 8(b)", "Share of attention on an A30", (), out_of_scope(NO_A30), "a drawing"),
        Claim(
            "Figure 8(d)",
            "DGL spends most of its time in attention",
            (MODELS_FP32,),
            model_times.baseline_spends_most,
        ),
        Claim(
            "end to end",
            "Attention stays the bottleneck on Reddit, Ogbn-products and AmazonProducts",
            (MODELS_FP32,),
            model_times.bottleneck_on("reddit", "ogbn-products", "amazon-products"),
        ),
        Claim(
            "end to end",
            "On the H100 attention is a constant or growing share as d grows",
            (MODELS_FP32,),
            model_times.share_by_width,
        ),
        Claim("end to end", "On the A30 its share falls as d grows", (), out_of_scope(NO_A30)),
        Claim(
            "end to end",
            "10 blocks: attention, three feed-forward layers, two norms",
            ("tests/models/test_graph_transformer.py::test_model_is_the_architecture_of_the_paper",),
            by_test("What the paper leaves open follows the published model: post-norm, LayerNorm, biases, 1/sqrt(d)."),
        ),
        Claim(
            "end to end",
            "Five single graphs, five batches, d = 64, 128, 256",
            ("tests/configs/test_end_to_end.py::test_the_sets_and_widths_of_the_paper", MODELS),
            by_test("The published evaluation's sets and others; synthetic where the official set was out of reach."),
        ),
        Claim(
            "end to end",
            "The attention kernel is replaced, all else is kept: outputs agree",
            ("tests/models/test_execution.py::test_gpu_all_backends_and_executions_agree", MODELS),
            by_test("Every time is kept only after the output agreed with the reference."),
        ),
        Claim(
            "Figure 8",
            "Milliseconds stand on the bars, missing bars are out of memory",
            ("tests/report/test_plot_models.py::test_each_missing_bar_has_a_reason_and_the_baseline_its_time",),
            by_test("The baseline carries its milliseconds, the other bars their speed-up, a missing bar its reason."),
        ),
    ),
)
