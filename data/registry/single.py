"""Entries of the single graphs: the paper's, then further ones, each by increasing number of edges.

If A has one direction only, the first end of a published edge is the query.
"""

from data.registry.entry import Dataset, Published
from data.sources.dgl_graphs import DglGraph
from data.sources.edge_lists import EdgeList
from data.sources.elliptic import Elliptic
from data.sources.embedded import EmbeddedGraph
from data.sources.facebook100 import Facebook100
from data.sources.graphsaint import GraphSaint
from data.sources.igb import Igb
from data.sources.ogb_sets import OgbNodes
from data.sources.papers100m import Papers100M
from data.sources.planetoid import Planetoid
from data.synthetic.graph import WindowedGraph
from data.synthetic.huge import HugeGraph
from data.synthetic.windows import Deciles, LogNormal

_NO_FEATURES = 128  # columns of random features, for sets without any
_RANDOM_FEATURES = "the original has no node features; random ones are used"
_ASSUMED = "the direction (first end of an edge = query) is an assumption, not checked against published statistics"
_UNPUBLISHED = "no block statistics are published; its surrogate follows those of the real file"
# Bounds of the deciles of the TCBs per row window: the paper's, or (Facebook, Epinions, Cornell, Twitter) counted.
_PUBMED = (1, 5, 6, 7, 8, 9, 10, 11, 12, 14, 43)
_GITHUB = (2, 13, 16, 18, 20, 23, 25, 29, 34, 46, 1191)
_FACEBOOK = (6, 17, 20, 23, 25, 28, 31, 34, 39, 45, 117)
_EPINIONS = (0, 1, 2, 2, 2, 3, 4, 6, 11, 27, 355)
_CORNELL = (56, 117, 131, 141, 149, 156, 165, 174, 186, 202, 502)
_TWITTER = (1, 6, 10, 14, 17, 21, 25, 33, 46, 71, 614)
_YELP = (4, 9, 12, 15, 19, 23, 29, 38, 52, 82, 1000)
_REDDIT = (4, 46, 88, 135, 190, 265, 367, 503, 718, 1114, 9857)

_PLANETOID = {
    "task": "node",
    "metric": "accuracy",
    "symmetric": True,
    "homepage": "https://github.com/kimiyoung/planetoid",
    "licence": "MIT (kimiyoung/planetoid)",
    "citation": "Yang, Cohen, Salakhutdinov: Revisiting Semi-Supervised Learning with Graph Embeddings, ICML 2016",
}
_SNAP = {
    "task": "node",
    "symmetric": False,
    "num_classes": 2,
    "feature_dim": _NO_FEATURES,
    "licence": "not stated by SNAP",
    "note": f"one direction, as the paper's count of edges; {_ASSUMED}; {_RANDOM_FEATURES}",
}
_MUSAE = "Rozemberczki, Allen, Sarkar: Multi-Scale Attributed Node Embedding, J. Complex Networks 9(2), 2021"
_GRAPHSAINT = "Zeng et al.: GraphSAINT: Graph Sampling Based Inductive Learning Method, ICLR 2020"
_OGB = {
    "task": "node",
    "homepage": "https://ogb.stanford.edu/docs/nodeprop/",
    "citation": "Hu et al.: Open Graph Benchmark: Datasets for Machine Learning on Graphs, NeurIPS 2020",
}
_IGB = {
    "task": "node",
    "metric": "accuracy",
    "symmetric": False,
    "num_classes": 19,
    "feature_dim": 1_024,
    "homepage": "https://github.com/IllinoisGraphBenchmark/IGB-Datasets",
    "licence": "as stated in the IGB-Datasets repository",
    "citation": "Khatua et al.: IGB: Addressing the Gaps in Labeling, Features, Heterogeneity, and Size of Public "
    "Graph Datasets for Deep Learning Research, KDD 2023",
    "note": f"one direction: a paper attends to the papers it cites; {_ASSUMED}; edges after duplicates",
}
# The publisher's download script names this bucket and the checksums.
_IGB_ARCHIVES = "https://igb-public-awsopen.s3.amazonaws.com/igb-homogeneous/igb_homogeneous"

SINGLE = (
    Dataset(
        name="cora",
        num_nodes=2_708,
        nnz=10_556,
        num_classes=7,
        feature_dim=1_433,
        official=Planetoid("cora", "CoraGraphDataset"),
        embedded=EmbeddedGraph("cora", "cora_v2", "https://github.com/kimiyoung/planetoid"),
        synthetic=WindowedGraph(LogNormal(0.402), 7.46, row_sigma=0.87, slope=-0.08, patch_share=0.108, patch_side=3),
        published=Published(1_268, 7.5, 0.38, 8.3, 0.29),
        **_PLANETOID,
    ),
    Dataset(
        name="citeseer",
        num_nodes=3_327,
        nnz=9_228,
        num_classes=6,
        feature_dim=3_703,
        official=Planetoid("citeseer", "CiteseerGraphDataset"),
        synthetic=WindowedGraph(LogNormal(0.295), 5.75, row_sigma=1.6, patch_share=0.044, self_loops=124),
        published=Published(1_197, 5.8, 0.31, 7.7, 0.24),
        **_PLANETOID,
    ),
    Dataset(
        name="pubmed",
        num_nodes=19_717,
        nnz=88_651,
        num_classes=3,
        feature_dim=500,
        official=Planetoid("pubmed", "PubmedGraphDataset"),
        synthetic=WindowedGraph(Deciles(_PUBMED), 9.31, row_sigma=1.36, patch_share=0.008, self_loops=3),
        published=Published(11_474, 9.3, 0.45, 7.7, 0.18, _PUBMED),
        **_PLANETOID,
    ),
    Dataset(
        name="elliptic",
        task="node",
        num_nodes=203_769,
        nnz=234_355,
        symmetric=False,
        num_classes=2,
        feature_dim=165,
        homepage="https://www.kaggle.com/datasets/ellipticco/elliptic-data-set",
        licence="terms of the Kaggle page",
        citation="Weber et al.: Anti-Money Laundering in Bitcoin, KDD Workshop on Anomaly Detection in Finance 2019",
        official=Elliptic(),
        synthetic=WindowedGraph(
            LogNormal(0.634), 2.46, row_sigma=2.35, slope=-0.14, patch_share=0.2, patch_side=3, column_sigma=0.67
        ),
        published=Published(31_286, 2.5, 0.57, 7.5, 0.45),
        note="one direction, as published: the first transaction of a pair attends to the second; fetched from PyG's "
        "mirror, as Kaggle asks for a login",
        repeats=10,
    ),
    Dataset(
        name="musae-github",
        task="node",
        num_nodes=37_700,
        nnz=578_006,
        symmetric=True,
        num_classes=2,
        feature_dim=_NO_FEATURES,
        homepage="https://github.com/benedekrozemberczki/MUSAE",
        licence="GPL-3.0 (benedekrozemberczki/MUSAE)",
        citation=_MUSAE,
        official=EdgeList(
            "https://snap.stanford.edu/data/git_web_ml.zip",
            "git_web_ml/musae_git_edges.csv",
            member="git_web_ml/musae_git_edges.csv",
            both_directions=True,
        ),
        synthetic=WindowedGraph(Deciles(_GITHUB), 29.41, row_sigma=0.43, hub=0.87, slope=0.11),
        published=Published(69_325, 29.4, 1.34, 8.3, 0.15, _GITHUB),
        note="the original has 4005 binary features; without them 128 random float features are used",
    ),
    Dataset(
        name="artist",
        task="node",
        num_nodes=50_515,
        nnz=819_306,
        symmetric=False,
        num_classes=2,
        feature_dim=_NO_FEATURES,
        homepage="https://snap.stanford.edu/data/gemsec-Facebook.html",
        licence="GPL-3.0 (benedekrozemberczki/GEMSEC)",
        citation="Rozemberczki, Davies, Sarkar, Sutton: GEMSEC: Graph Embedding with Self Clustering, ASONAM 2019",
        official=EdgeList(
            "https://snap.stanford.edu/data/gemsec_facebook_dataset.tar.gz",
            "gemsec_facebook/artist_edges.csv",
            member="facebook_clean_data/artist_edges.csv",
        ),
        synthetic=WindowedGraph(LogNormal(0.73), 32.2, patch_share=0.02, column_sigma=1.0),
        published=Published(101_695, 32.0, 0.73, 8.0, 0.11),
        note=f"one direction, as the paper's count of edges; {_ASSUMED}; {_RANDOM_FEATURES}",
    ),
    Dataset(
        name="com-amazon",
        num_nodes=334_863,
        nnz=925_872,
        homepage="https://snap.stanford.edu/data/com-Amazon.html",
        citation="Yang, Leskovec: Defining and Evaluating Network Communities Based on Ground-Truth, ICDM 2012",
        official=EdgeList(
            "https://snap.stanford.edu/data/bigdata/communities/com-amazon.ungraph.txt.gz",
            "com-amazon.ungraph.txt.gz",
        ),
        synthetic=WindowedGraph(LogNormal(0.61), 5.92, patch_share=0.01),
        published=Published(123_815, 6.0, 0.61, 7.5, 0.22),
        repeats=5,
        **_SNAP,
    ),
    Dataset(
        name="amazon0505",
        num_nodes=410_236,
        nnz=3_356_824,
        homepage="https://snap.stanford.edu/data/amazon0505.html",
        citation="Leskovec, Adamic, Huberman: The Dynamics of Viral Marketing, ACM Transactions on the Web 1(1), 2007",
        official=EdgeList("https://snap.stanford.edu/data/amazon0505.txt.gz", "amazon0505.txt.gz"),
        synthetic=WindowedGraph(
            LogNormal(0.181), 12.3, row_sigma=0.7, patch_share=0.357, patch_side=4, column_sigma=0.42
        ),
        published=Published(315_485, 12.3, 0.20, 10.6, 0.46),
        repeats=5,
        **_SNAP,
    ),
    Dataset(
        name="blog",
        task="node",
        num_nodes=88_784,
        nnz=4_186_390,
        symmetric=True,
        num_classes=2,
        feature_dim=_NO_FEATURES,
        homepage="https://networkrepository.com/soc-BlogCatalog.php",
        licence="CC BY-SA (Network Repository)",
        citation="Rossi, Ahmed: The Network Data Repository with Interactive Graph Analytics and Visualization, "
        "AAAI 2015",
        official=EdgeList(
            "https://nrvis.com/download/data/soc/soc-BlogCatalog.zip",
            "soc-BlogCatalog.mtx",
            member="soc-BlogCatalog.mtx",
        ),
        synthetic=WindowedGraph(LogNormal(2.82, 88_784 / 8), 69.0, row_sigma=1.0, hub=0.5, slope=0.29),
        published=Published(382_736, 69.0, 2.47, 11.0, 0.44),
        note=_RANDOM_FEATURES,
        repeats=5,
    ),
    Dataset(
        name="igb-small",
        num_nodes=1_000_000,
        nnz=12_068_130,
        official=Igb("small", f"{_IGB_ARCHIVES}_small.tar.gz", "md5:6781c699723529902ace0a95cafe6fe4"),
        synthetic=WindowedGraph(LogNormal(0.25), 24.57, row_sigma=0.6),
        published=Published(1_535_534, 24.4, 0.25, 7.9, 0.11),
        repeats=5,
        **_IGB,
    ),
    Dataset(
        name="yelp",
        task="node",
        num_nodes=716_847,
        nnz=13_954_819,
        symmetric=True,
        num_classes=100,
        feature_dim=300,
        homepage="https://github.com/GraphSAINT/GraphSAINT",
        licence="MIT (GraphSAINT's code); the reviews are under Yelp's terms",
        citation=_GRAPHSAINT,
        official=DglGraph("YelpDataset"),
        metric="f1",
        synthetic=WindowedGraph(Deciles(_YELP), 39.03, row_sigma=0.62, hub=0.15, slope=-0.01),
        published=Published(1_748_640, 39.0, 1.28, 8.0, 0.09, _YELP),
        repeats=5,
    ),
    Dataset(
        name="reddit",
        task="node",
        num_nodes=232_965,
        nnz=114_848_857,
        symmetric=True,
        num_classes=41,
        feature_dim=602,
        homepage="https://snap.stanford.edu/graphsage/",
        licence="not stated by its publisher",
        citation="Hamilton, Ying, Leskovec: Inductive Representation Learning on Large Graphs, NeurIPS 2017",
        official=DglGraph("RedditDataset", {"self_loop": True}),
        metric="accuracy",
        synthetic=WindowedGraph(
            # Above the paper's 9857, since the longest window loses blocks to repeated edges.
            Deciles((*_REDDIT[:-1], 11_500)),
            477.2,
            row_sigma=0.8,
            hub=0.2,
            slope=0.12,
            patch_share=0.55,
            patch_side=8,
            self_loops=232_965,
        ),
        published=Published(6_947_860, 477.2, 1.35, 16.5, 0.95, _REDDIT),
        note="with the self loops that the published count of edges includes; DGL orders the nodes by RCM",
        repeats=5,
    ),
    Dataset(
        name="igb-medium",
        num_nodes=10_000_000,
        nnz=119_994_908,
        official=Igb("medium", f"{_IGB_ARCHIVES}_medium.tar.gz", "md5:4640df4ceee46851fd18c0a44ddcc622"),
        synthetic=WindowedGraph(LogNormal(0.58), 24.42, row_sigma=0.6),
        published=Published(15_259_451, 24.4, 0.58, 7.9, 0.11),
        warmup=1,
        repeats=3,
        **_IGB,
    ),
    Dataset(
        name="ogbn-products",
        num_nodes=2_449_029,
        nnz=123_718_152,
        symmetric=True,
        num_classes=47,
        feature_dim=100,
        licence="Amazon's licence (see the homepage)",
        official=OgbNodes("ogbn-products", "products", "sales_ranking", both_directions=True),
        metric="accuracy",
        synthetic=WindowedGraph(LogNormal(0.84), 101.36),
        published=Published(15_514_702, 101.4, 0.84, 8.0, 0.05),
        repeats=5,
        **_OGB,
    ),
    Dataset(
        name="amazon-products",
        task="node",
        num_nodes=1_569_960,
        nnz=264_339_468,
        symmetric=True,
        num_classes=107,
        feature_dim=200,
        homepage="https://github.com/GraphSAINT/GraphSAINT",
        licence="MIT (GraphSAINT's code); the data's is not stated",
        citation=_GRAPHSAINT,
        official=GraphSaint("amazon", "17qhNA8H1IpbkkR-T2BmPQm8QNW5do-aa", "10SW8lCvAj-kb6ckkfTOC5y0l8XXdtMxj"),
        synthetic=WindowedGraph(LogNormal(1.22), 330.5, slope=0.03, patch_share=0.02),
        published=Published(32_432_413, 330.5, 1.22, 8.2, 0.07),
        note="labels are not read",
        warmup=1,
        repeats=3,
    ),
    Dataset(
        name="questions",
        task="node",
        num_nodes=48_921,
        nnz=307_080,
        symmetric=True,
        num_classes=2,
        feature_dim=301,
        homepage="https://github.com/yandex-research/heterophilous-graphs",
        licence="MIT (yandex-research/heterophilous-graphs)",
        citation="Platonov et al.: A Critical Look at the Evaluation of GNNs under Heterophily, ICLR 2023",
        official=DglGraph("QuestionsDataset", file="questions.npz"),
        metric="rocauc",
        synthetic=WindowedGraph(LogNormal(0.5), 307_080 / 8 / 3_058 + 0.44, row_sigma=1.2),
        note="no block statistics are published; its surrogate has the nodes and edges only",
    ),
    Dataset(
        name="facebook-large",
        task="node",
        num_nodes=22_470,
        nnz=341_825,
        symmetric=True,
        num_classes=4,
        feature_dim=_NO_FEATURES,
        homepage="https://snap.stanford.edu/data/facebook-large-page-page-network.html",
        licence="MIT (benedekrozemberczki/datasets)",
        citation=_MUSAE,
        official=EdgeList(
            "https://snap.stanford.edu/data/facebook_large.zip",
            "facebook_large/musae_facebook_edges.csv",
            member="facebook_large/musae_facebook_edges.csv",
            both_directions=True,
        ),
        synthetic=WindowedGraph(Deciles(_FACEBOOK), 30.26, row_sigma=1.1, patch_share=0.015, self_loops=179),
        note="with the 179 self loops of the file; the binary features and the labels are not read, 128 random float "
        f"features are used; {_UNPUBLISHED}",
    ),
    Dataset(
        name="soc-epinions1",
        task="node",
        num_nodes=75_888,
        nnz=508_837,
        symmetric=False,
        num_classes=2,
        feature_dim=_NO_FEATURES,
        homepage="https://snap.stanford.edu/data/soc-Epinions1.html",
        licence="not stated by SNAP",
        citation="Richardson, Agrawal, Domingos: Trust Management for the Semantic Web, ISWC 2003",
        official=EdgeList(
            "https://snap.stanford.edu/data/soc-Epinions1.txt.gz", "soc-Epinions1.txt.gz", keeps_ids=True
        ),
        synthetic=WindowedGraph(
            Deciles(_EPINIONS), 10.85, row_sigma=1.4, patch_share=0.2, patch_side=4, column_sigma=2.3
        ),
        note=f"one direction: a person attends to those whom they trust; {_ASSUMED}; nodes keep SNAP's ids, 9 of which "
        f"have no edge (SNAP counts 75,879 nodes); {_RANDOM_FEATURES}; {_UNPUBLISHED}",
    ),
    Dataset(
        name="flickr",
        task="node",
        num_nodes=89_250,
        nnz=899_756,
        symmetric=True,
        num_classes=7,
        feature_dim=500,
        homepage="https://github.com/GraphSAINT/GraphSAINT",
        licence="MIT (GraphSAINT's code); the pictures' data under Flickr's terms",
        citation=_GRAPHSAINT,
        official=DglGraph("FlickrDataset"),
        metric="accuracy",
        synthetic=WindowedGraph(LogNormal(0.5), 899_756 / 8 / 5_579 + 0.44, row_sigma=1.2),
        note="no block statistics are published; its surrogate has the nodes and edges only",
    ),
    Dataset(
        name="ogbn-arxiv",
        num_nodes=169_343,
        nnz=1_166_243,
        symmetric=False,
        num_classes=40,
        feature_dim=128,
        licence="ODC-BY",
        official=OgbNodes("ogbn-arxiv", "arxiv", "time"),
        metric="accuracy",
        synthetic=WindowedGraph(LogNormal(0.5), 13.75, row_sigma=1.0, patch_share=0.02, column_sigma=1.8),
        note="one direction: a paper attends to the papers it cites",
        repeats=10,
        **_OGB,
    ),
    Dataset(
        name="fb100-cornell5",
        task="node",
        num_nodes=18_660,
        nnz=1_581_554,
        symmetric=True,
        num_classes=2,
        feature_dim=_NO_FEATURES,
        homepage="https://github.com/CUAI/Non-Homophily-Large-Scale",
        licence="MIT (CUAI/Non-Homophily-Benchmarks)",
        citation="Traud, Mucha, Porter: Social Structure of Facebook Networks, Physica A 391(16), 2012",
        official=Facebook100("Cornell5"),
        synthetic=WindowedGraph(Deciles(_CORNELL), 159.41, row_sigma=0.9),
        note="friendships of Facebook100 at Cornell; personal attributes are not read, random features are used; "
        f"{_UNPUBLISHED}",
        repeats=10,
    ),
    Dataset(
        name="ego-twitter",
        task="node",
        num_nodes=81_306,
        nnz=2_684_606,
        symmetric=True,
        num_classes=2,
        feature_dim=_NO_FEATURES,
        homepage="https://snap.stanford.edu/data/ego-Twitter.html",
        licence="not stated by SNAP",
        citation="McAuley, Leskovec: Learning to Discover Social Circles in Ego Networks, NIPS 2012",
        official=EdgeList(
            "https://snap.stanford.edu/data/twitter_combined.txt.gz", "twitter_combined.txt.gz", both_directions=True
        ),
        synthetic=WindowedGraph(Deciles(_TWITTER), 33.44, row_sigma=1.2, patch_share=0.57, patch_side=6, self_loops=14),
        note="both directions of each of SNAP's 1,768,149 edges; a node is the rank of its Twitter id; "
        f"{_RANDOM_FEATURES}; {_UNPUBLISHED} in the node order of SNAPDatasets.jl's copy",
        repeats=5,
    ),
    Dataset(
        name="igb-large",
        num_nodes=100_000_000,
        nnz=1_223_571_364,
        official=Igb("large"),
        synthetic=HugeGraph(),
        warmup=1,
        repeats=3,
        **_IGB,
    ),
    Dataset(
        name="ogbn-papers100m",
        num_nodes=111_059_956,
        nnz=1_615_685_872,
        symmetric=False,
        num_classes=172,
        feature_dim=128,
        licence="ODC-BY",
        official=Papers100M("ogbn-papers100M", "papers100M-bin", "time"),
        synthetic=HugeGraph(),
        metric="accuracy",
        note="one direction: a paper attends to the papers it cites",
        warmup=1,
        repeats=3,
        **_OGB,
    ),
)
