"""Selections of recorded rows that tables, figures and claims share: allowed values by column (`report.rows.select`).

They are laid over each other with `|`. claims.yaml names them: `use: [KERNEL, WARM]`.
"""

TIME = {"metric": "time"}
GRAPHS = {"group": ["single", "batched", "more"]}
WARM = {"launch": "back_to_back", "l2": "warm"}
ISOLATED = {"launch": "isolated", "l2": "warm"}
FIXED = TIME | {"bench": "kernels", "plan": "fixed", "heads": 1, "out_dtype": "float32"}
ABLATION = FIXED | WARM | {"dtype": "float16", "dim": 128}
EACH_TYPE = FIXED | {"order": "none", "dtype": {"not": ["any", "bfloat16"]}}
KERNEL = EACH_TYPE | {"variant": "none"}
PAPER = {"backend": "fused3s_paper"}
OURS = {"backend": "fused3s"}
REORDERED = OURS | {"order": "auto"}
BEST_OTHER = {"backend": "best other", "dtype": "any"}
NO_BEST = {"backend": {"not": ["best other"]}}
TWINS = {"kind": "synthetic", "group": "twin"}
ORIGINALS = GRAPHS | {"kind": "real"}  # of the twins

PUBLISHED = TIME | {"bench": "published"}
CODES = TIME | {"bench": "codes", "launch": "none", "l2": "none", "plan": "none"}
KERNEL_SUMS = {"bench": "codes", "metric": "kernel_time", "launch": "none", "l2": "warm", "plan": "none"}


EAGER = {"launch": "eager"}
GRAPH = {"launch": "cuda_graph"}
FP32 = {"dtype": "float32", "out_dtype": "float32"}
MODEL = TIME | GRAPH | {"bench": "end_to_end", "region": "none", "scope": "model", "heads": 1, "blocks": 10}
MODEL |= {"dtype": "float16", "dense": "plain", "variant": "none"}
TF32 = {"dtype": "float32", "out_dtype": "tf32"}
FP16 = {"dtype": "float16", "out_dtype": "float16"}
PRECISIONS = {"float32": FP32, "TF32": TF32, "float16": FP16}  # of the layers outside attention
SIZES = ["1m", "4m", "17m", "67m", "134m"]  # edges of the variants of configs/bench/scale.yaml
BACKWARD = TIME | OURS | {"bench": "backward", "region": "backward", "launch": "back_to_back"}

# Data sets in the order of the paper's figures; Peptides-struct has the edges of Peptides-func.
FIGURE_5 = ["citeseer", "cora", "pubmed", "elliptic", "musae-github", "artist", "com-amazon", "amazon0505", "blog"]
FIGURE_5 += ["igb-small", "yelp", "reddit", "igb-medium", "ogbn-products", "amazon-products"]
FIGURE_6 = ["zinc", "pascalvoc-sp", "coco-sp", "peptides-func", "ogbg-molhiv", "ogbg-ppa", "ogbg-molpcba", "ogbg-code2"]
# Six real graphs, and the three that the paper's text names.
LARGE = ["reddit", "ogbn-products", "amazon-products"]
FIGURE_8 = ["pubmed", "elliptic", "musae-github", "ogbn-arxiv", "ogbg-molhiv", "peptides-func", *LARGE]
MODEL_32 = MODEL | EAGER | FP32 | {"dataset": FIGURE_8, "dim": 128}
MODEL_16, MODEL_TF32 = MODEL_32 | FP16, MODEL_32 | TF32
