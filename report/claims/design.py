"""Claims about the algorithm, the format, precision, the set-up, and what the paper leaves to others."""

from report.claims import bandwidth, formats, graphs, stability
from report.claims.claim import Claim, Section, Verdict, by_test, out_of_scope
from report.claims.results import KERNELS, LIST, SM_ACTIVE

STABILITY = "make reproduce-figures FIGURES=stability"
PEAK_RATES = "make reproduce-figures FIGURES=peak_rates"
TABLES = "make tables"
MASKS = "make reproduce-figures FIGURES=masks"

ON_CPU = "tests/baselines/test_cuda_on_cpu_baselines.py::test_the_papers_kernel"
EVERY_ROW = "tests/kernels/backends/test_fused_kernels.py::test_edge_cases"
SWITCHES = "tests/kernels/backends/test_fused_kernels.py::test_switches_of_the_papers_kernel_keep_the_result"
SPLIT_ROWS = "tests/baselines/test_fused3s_paper.py::test_split_rows_on_edge_cases"
FRAGMENTS = "tests/kernels/test_fragments.py::test_elements_are_bijections"
BSB = "tests/kernels/formats/test_bsb.py::test_arrays_equal_the_papers_construction"
INVERSE = "tests/kernels/formats/test_bsb.py::test_to_csr_is_the_inverse"

ALGORITHM = Section(
    "Algorithms, partitioning and layout",
    (
        Claim(
            "Algorithm 1, lines 1 to 3",
            "Q and O in blocks of r rows, a row window per thread block",
            (ON_CPU, EVERY_ROW),
            by_test("The last window is guarded; the published code reads past the end of Q."),
        ),
        Claim(
            "Algorithm 1, line 4",
            "Maximum starts at minus infinity, sum and output at 0, in fp32",
            (ON_CPU, "tests/kernels/backends/test_fused_kernels.py::test_unusual_scores"),
            by_test("As written; the published code starts the maximum at 0, so that rows far below 0 become 0 there."),
        ),
        Claim(
            "Algorithm 1, lines 5 to 8",
            "Q to shared memory, t from tro, rows of K and V gathered by sptd",
            (ON_CPU,),
            by_test("As written."),
        ),
        Claim(
            "Algorithm 1, lines 9 to 11",
            "K and V in blocks of W c rows, one inner loop over them",
            (ON_CPU,),
            by_test("W = 8; the paper gives no W."),
        ),
        Claim(
            "Algorithm 1, lines 13 and 14",
            "Scores by TBGemm, masked by the bitmap",
            (ON_CPU, "tests/kernels/backends/test_fused_kernels.py::test_every_edge_counts_once"),
            by_test("A non-edge is minus infinity, a score of 0 is an edge; in the published code 0 means no edge."),
        ),
        Claim(
            "Algorithm 1, lines 16 to 18",
            "Online softmax: running maximum, exponentials, rescaled sum",
            (ON_CPU, STABILITY),
            by_test(
                "Row sums stay in registers and are added once after the loop: the result differs by rounding only."
            ),
        ),
        Claim(
            "Algorithm 1, line 19",
            "E is cast to fp16 into shared memory",
            (ON_CPU,),
            by_test("As written."),
        ),
        Claim(
            "Algorithm 1, lines 21 to 23",
            "O is rescaled, SpMM by TBGemm, the maximum is kept",
            (ON_CPU,),
            by_test("As written."),
        ),
        Claim(
            "Algorithm 1, line 24",
            "O over l is written to memory",
            (ON_CPU, EVERY_ROW),
            by_test("A row without an edge, undefined in the paper, is 0."),
        ),
        Claim(
            "Algorithm 2",
            "TBGemm: A in shared memory, B from memory to registers, accumulation in fp32",
            (FRAGMENTS, ON_CPU),
            by_test("As written."),
        ),
        Claim(
            "fusion, Figure 2 (node-parallel)",
            "Thread blocks are independent: one holds all of its rows",
            (SWITCHES,),
            by_test("As written; the measured alternative is under Performance breakdown."),
        ),
        Claim(
            "load balancing",
            "Row windows are sorted by decreasing number of blocks, in preprocessing",
            (BSB, SWITCHES, SM_ACTIVE),
            by_test("The order is part of the format and tested against a stable sort."),
        ),
        Claim(
            "load balancing",
            "The number of blocks per window varies widely",
            (TABLES,),
            graphs.deciles("pubmed", "musae-github"),
        ),
        Claim(
            "warp partitioning, Figure 3",
            "Split columns: warps compute tiles of their own",
            (ON_CPU,),
            by_test("As written."),
        ),
        Claim(
            "warp partitioning, Figure 3",
            "Split rows: warps share out the feature dimension and add parts",
            (SPLIT_ROWS,),
            by_test("Our form keeps eight blocks per iteration where the published one has one or two."),
        ),
        Claim(
            "data layout, Figure 4",
            "SDDMM: one 128-bit load per thread by a permutation of the columns of K and Q",
            (FRAGMENTS, SWITCHES),
            by_test("Lanes and registers are emulated one by one."),
        ),
        Claim(
            "data layout, Figure 4",
            "SpMM: wider loads of V, and the inverse permutation when O is written",
            (FRAGMENTS, SWITCHES),
            by_test("Two 16-bit loads become one of 32 bits."),
        ),
        Claim(
            "data layout",
            "Staging K and V in shared memory (wmma) has no performance benefit",
            (PEAK_RATES, KERNELS),
            by_test(
                "The paper's kernel loads to registers. `fused3s` stages by cp.async, gathers at about the same rate "
                "(figures/peak-rates) and is faster, so that the claim holds for rates of gathers alone.",
                Verdict.IN_PART,
            ),
        ),
        Claim("data layout", "Sparse operations are often bound by bandwidth", (KERNELS,), bandwidth.bandwidth_bound),
    ),
)

FORMAT = Section(
    "Binary Sparse Block format",
    (
        Claim(
            "sparse format, Figure 1",
            "Row windows of r rows, empty columns dropped, blocks of r x c, 16 x 8 in practice",
            (BSB,),
            by_test(
                "Against a direct construction, any r up to 256. Figure 1's 4 x 2 blocks cannot be built: 8 divides c."
            ),
        ),
        Claim(
            "sparse format",
            "Three arrays: tro, sptd, bitmap of r c bits",
            (BSB, INVERSE),
            by_test("Offsets have one entry more than the table counts; padding repeats the window's last column."),
        ),
        Claim(
            "sparse format",
            "The published kernels' block",
            (KERNELS,),
            by_test("The paper's 16 x 8 is timed; the published single-block kernels run with blocks of 16 columns."),
        ),
        Claim(
            "sparse format",
            "Binary: no array of values",
            (INVERSE,),
            by_test("Structure only; an exact inverse exists."),
        ),
        Claim(
            "format table",
            "Footprints of eight formats",
            ("tests/kernels/formats/test_bsb.py::test_nbytes_is_the_format_tables_formula", TABLES),
            by_test("By formula and as really built, in datasets/formats.md; the largest sets by formula only."),
        ),
        Claim(
            "sparse format",
            "BSB reduces the footprint further than BitTCF",
            (TABLES,),
            formats.footprint("BitTCF"),
            "smaller",
        ),
        Claim(
            "sparse format",
            "BSB reduces the footprint further than ME-TCF, which it extends",
            (TABLES,),
            formats.footprint("ME-TCF"),
            "smaller",
        ),
        Claim(
            "sparse format",
            "Row-based formats such as CSR are incompatible with tensor cores",
            (),
            out_of_scope("A statement about hardware; the CSR kernels here run on CUDA cores."),
        ),
        Claim("sparse format", "BCSR without compaction stores more", (TABLES,), formats.fewer_blocks),
        Claim(
            "sparse format",
            "Other tile shapes than 16 x 8",
            (BSB,),
            by_test("16 x 16 in `fused3s`, 8 x 16 in FlashSparse."),
        ),
        Claim(
            "operand shapes table",
            "m16n8k16 is the practical compromise, in fp16 and bf16",
            (FRAGMENTS, EVERY_ROW),
            by_test("Both types run; TF32 and FP8 are out of scope below."),
        ),
    ),
)

PRECISION = Section(
    "Mixed precision and stability",
    (
        Claim(
            "precision table",
            "Q, K, V fp16; S fp32; E fp32 to fp16; O fp32",
            (ON_CPU, EVERY_ROW),
            by_test("As written; fp16 output too."),
        ),
        Claim("mixed precision", "Balances performance and accuracy", (KERNELS,), stability.accuracy),
        Claim(
            "mixed precision",
            "Naive softmax overflows above e^89 in fp32 and e^11 in fp16",
            (STABILITY,),
            stability.overflow,
            "89 and 11",
        ),
        Claim(
            "mixed precision",
            "Overflow corrupts inference; stabilized softmax prevents it (forward pass)",
            (STABILITY, "tests/baselines/test_baselines.py::test_naive_softmax_overflows_and_stable_does_not"),
            stability.stable_kernels,
        ),
        Claim(
            "mixed precision",
            "Online softmax is less stable, particularly with small blocks",
            (STABILITY,),
            stability.online_by_block,
        ),
    ),
)

SETUP = Section(
    "Set-up",
    (
        Claim(
            "GPU architecture",
            "NVIDIA A30, 56 SMs, 165 TFLOP/s, 933 GB/s",
            (),
            out_of_scope("No A30 was at hand; every value of it is the authors'."),
        ),
        Claim(
            "GPU architecture",
            "NVIDIA H100, 132 SMs, 990 TFLOP/s, 4 TB/s",
            (),
            out_of_scope(
                "Measured on an H200: as many SMs, more bandwidth. Shares of bandwidth make the two comparable."
            ),
        ),
        Claim(
            "data set table",
            "Cora, Citeseer, Pubmed, Musae-github, Elliptic: sizes and blocks",
            (TABLES, "tests/kernels/formats/test_bsb.py::test_statistics_equal_the_papers_table"),
            graphs.data_set_table("cora", "citeseer", "pubmed", "musae-github", "elliptic"),
        ),
        Claim(
            "data set table",
            "IGB-small, IGB-medium, Amazon0505, Com-Amazon, Artist, AmazonProducts, Yelp, Reddit, Blog, Ogbn-products",
            (LIST, TABLES, "tests/data/test_synthetic.py::test_block_statistics_are_the_papers"),
            graphs.data_set_table(
                *("igb-small", "igb-medium", "amazon0505", "com-amazon", "artist", "amazon-products", "yelp"),
                *("reddit", "blog", "ogbn-products"),
            ),
        ),
        Claim("decile table", "Pubmed and Github", (TABLES,), graphs.deciles("pubmed", "musae-github")),
        Claim("decile table", "Yelp and Reddit", (TABLES,), graphs.deciles("yelp", "reddit")),
        Claim(
            "data sets",
            "Batches of 1,024 graphs of OGB and LRGB: nine sets",
            (LIST, TABLES, "tests/configs/test_load.py::test_the_published_run_is_the_default_of_order_and_split"),
            graphs.data_set_table(
                *("ogbg-molhiv", "ogbg-molpcba", "ogbg-ppa", "ogbg-code2", "zinc", "peptides-func", "peptides-struct"),
                *("pascalvoc-sp", "coco-sp"),
            ),
        ),
        Claim(
            "data sets",
            "IGB-large and Ogbn-papers100M",
            (LIST,),
            by_test("Loaders and synthetic graphs of their size are there; times are under Memory and scale."),
        ),
        Claim(
            "data sets",
            "CV is sigma over mu",
            ("tests/kernels/formats/test_bsb.py::test_statistics_of_a_matrix_counted_by_hand",),
            by_test("Population sigma, which gives the table's values."),
        ),
        Claim(
            "timing",
            "The paper does not describe its timing; its code takes single launches between events",
            (KERNELS,),
            by_test("Ours are medians of CUDA graph replays, back to back and one launch at a time, L2 warm and cold."),
        ),
        Claim(
            "baselines",
            "DF-GNN tiling and hyper: fp32, fused, stable softmax, CUDA cores",
            ("tests/baselines/test_cuda_on_cpu_baselines.py::test_dfgnn",),
            by_test("Written anew from their description; the authors' code is measured beside them."),
        ),
        Claim(
            "baselines",
            "FlashSparse: separate kernels on tensor cores, naive softmax, and a stable one",
            ("tests/baselines/test_cuda_on_cpu_baselines.py::test_flashsparse",),
            by_test(
                "Written anew with fp32 accumulation and right results; the authors' naive form is measured beside it."
            ),
        ),
        Claim(
            "baselines",
            "PyTorch Geometric",
            ("tests/baselines/test_baselines.py::test_real_graphs",),
            by_test("The library's own routines in the steps of TransformerConv."),
        ),
        Claim(
            "baselines",
            "DGL end to end",
            ("tests/kernels/test_attention.py::test_dgl_against_reference_on_real_graphs",),
            by_test("DGL's wheels have no CUDA: on the GPU `csr_unfused` stands for it.", Verdict.IN_PART),
        ),
    ),
)

OUTLOOK = Section(
    "Background, related and future work",
    (
        Claim(
            "Equations 1 and 4",
            "softmax(Q K^T masked by A) V with projections of the Graph Transformer",
            (
                "tests/kernels/test_attention.py::test_against_dense_float64",
                "tests/models/test_graph_transformer.py::test_model_is_the_architecture_of_the_paper",
            ),
            by_test("scale=1.0 is the paper's; the default is 1/sqrt(d)."),
        ),
        Claim(
            "background",
            "SDDMM, softmax and SpMM as separate operations",
            ("tests/kernels/test_attention.py::test_every_kind_of_graph_gives_the_same_result",),
            by_test("`csr_unfused`, FlashSparse and PyG compute it so."),
        ),
        Claim(
            "Equation 2 (GAT)",
            "softmax(LeakyReLU(concatenated projections) masked by A)",
            (),
            out_of_scope("The score is no dot product of two rows; the published kernel does not take it either."),
        ),
        Claim(
            "Equation 3 (AGNN)",
            "softmax(beta cos(H, H^T) masked by A) H with self loops",
            (
                "tests/models/test_agnn.py::test_equals_dgls_layer",
                "tests/models/test_agnn.py::test_the_fused_kernels_compute_it",
            ),
            by_test("A layer of a few lines through the attention call, equal to DGL's."),
        ),
        Claim(
            "Equation 5 (static masks)",
            "Longformer's sliding window with global tokens",
            (MASKS,),
            graphs.masks("fixed", "longformer"),
        ),
        Claim(
            "Equation 5 (static masks)",
            "BigBird's window, global and random blocks",
            (MASKS,),
            graphs.masks("fixed", "bigbird"),
        ),
        Claim(
            "sparse transformers (dynamic masks)",
            "Sparse attention also serves masks that are computed on the fly",
            (MASKS, "tests/scripts/test_bench_kernels.py::test_a_rebuilt_plan_builds_the_format_at_each_call"),
            graphs.masks("rebuilt", "longformer", "bigbird"),
        ),
        Claim(
            "background",
            "Graph Transformers with dense global attention and structural bias",
            (),
            out_of_scope("A survey; Laplacian positional encodings are an option of the model, off by default."),
        ),
        Claim(
            "method table",
            "15 methods by hardware, format, precision and fusion",
            (),
            out_of_scope(
                "A survey; DF-GNN, FlashSparse and Fused3S are kernels here, five more of its formats are built."
            ),
        ),
        Claim(
            "background, related work",
            "Rates of tensor cores by generation, edge-parallel SpMM of others, earlier kernels",
            (),
            out_of_scope("Cited work of others; the peak rates of our GPU are measured."),
        ),
        Claim("future work", "fp8", (), out_of_scope("Not built: K and V in 8 bits would halve the gathers.")),
        Claim(
            "operand shapes table",
            "TF32 and FP8 operands",
            (),
            out_of_scope("TF32 products serve float32 inputs, which the comparison does not use; FP8 is not built."),
        ),
        Claim(
            "future work",
            "Tensor Memory Accelerator",
            ("tests/dense/test_dense_block.py::test_every_row",),
            by_test(
                "Used by the fused dense block; a probe of bulk copies for the gathers was slower (kernels/NOTES.md).",
                Verdict.IN_PART,
            ),
        ),
        Claim(
            "future work",
            "Other tile shapes, swap and transpose",
            (),
            out_of_scope("8-row windows would never gather fewer rows (kernels/NOTES.md); not built for `fused3s`."),
        ),
        Claim(
            "future work",
            "Backward pass and training",
            (),
            out_of_scope("Inference only: the fused kernels refuse gradients; the reference has them."),
        ),
        Claim(
            "future work",
            "Thread-block clusters for load balance",
            (),
            out_of_scope("Not built; `fused3s` splits heavy windows over blocks through global memory instead."),
        ),
        Claim(
            "future work",
            "Per-graph structure of batches",
            (),
            out_of_scope("No path of its own; `reorder` puts similar rows into one window."),
        ),
        Claim("(not in the paper)", "Several GPUs", (), out_of_scope("One GPU, as in the paper.")),
    ),
)
