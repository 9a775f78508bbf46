"""Entries of the collections of small graphs. Nodes and edges are those of a batch of 1024 graphs.

nnz and num_tcbs are those of the published run, recovered from its throughputs. Node counts are not published. They
follow from nnz and the published mean nodes and edges of a graph, with three exceptions: ogbg-molhiv's nodes were
counted, ogbg-ppa's are 1024 times the mean (its edges grow with the square of its nodes), and ogbg-code2's are the
edges of 1024 trees plus 1024. zinc12k-val-test was not in the published run: its nodes and edges were counted.
"""

from data.registry.entry import Dataset, Published
from data.sources.molhiv import MolHiv
from data.sources.ogb_graphs import OgbGraphs
from data.sources.peptides import LrgbFile, Peptides
from data.sources.superpixels import COCO_CATEGORIES, Superpixels
from data.sources.zinc import Zinc
from data.synthetic.batch import DenseBatch, MoleculeBatch, SuperpixelBatch, SyntaxTreeBatch

# ogb.utils.features.get_atom_feature_dims(); written out, since files and surrogates do not need ogb
_ATOM_CODES = (119, 5, 12, 12, 10, 6, 6, 2, 2)
_BOND_CODES = (5, 6, 2)  # ogb.utils.features.get_bond_feature_dims()
_BONDS = {"edge_feature_dim": 3, "edge_feature_cardinalities": _BOND_CODES}
_NO_FEATURES = 128  # columns of random features, for sets without any
_OGB = "Hu et al.: Open Graph Benchmark: Datasets for Machine Learning on Graphs, NeurIPS 2020"
_LRGB = {
    "homepage": "https://github.com/vijaydwivedi75/lrgb",
    "citation": "Dwivedi et al.: Long Range Graph Benchmark, NeurIPS Datasets and Benchmarks 2022",
}
# Addresses and folders of dgl.data.lrgb.
_DROPBOX = "https://www.dropbox.com/s"
_VOC, _COCO = (f"{name}_superpixels_edge_wt_region_boundary" for name in ("voc", "coco"))
_PICTURES = "slic_compactness_30/edge_wt_region_boundary"
_ZINC = {
    "task": "graph",
    "metric": "mae",
    "num_graphs": 1_024,
    "symmetric": True,
    "num_classes": 1,
    "feature_dim": 1,
    "feature_cardinalities": (28,),
    "edge_feature_dim": 1,
    "edge_feature_cardinalities": (4,),
    "homepage": "https://github.com/graphdeeplearning/benchmarking-gnns",
    "licence": "MIT (benchmarking-gnns); the molecules are ZINC's, free to use",
    "citation": "Dwivedi et al.: Benchmarking Graph Neural Networks, JMLR 24(43), 2023",
    "synthetic": MoleculeBatch(size_cv=0.19),
}
_PEPTIDES = {
    **_LRGB,
    "task": "graph",
    "num_nodes": 151_437,
    "nnz": 308_314,
    "num_graphs": 1_024,
    "symmetric": True,
    "feature_dim": 9,
    "feature_cardinalities": _ATOM_CODES,
    **_BONDS,
    "licence": "CC BY-NC 4.0",
    "published": Published(num_tcbs=28_382),
    "synthetic": MoleculeBatch(size_cv=0.57),
    "repeats": 10,
    "note": "the first molecules of the train split; Peptides-func and -struct are the same molecules",
}

_STRUCTURE = (
    *(f"Inertia_{kind}_{axis}" for kind in ("mass", "valence") for axis in "abc"),
    *("length_a", "length_b", "length_c", "Spherocity", "Plane_best_fit"),
)

BATCHED = (
    Dataset(
        name="ogbg-molhiv",
        task="graph",
        num_nodes=21_535,
        nnz=45_740,
        num_graphs=1_024,
        symmetric=True,
        num_classes=1,
        feature_dim=9,
        feature_cardinalities=_ATOM_CODES,
        homepage="https://ogb.stanford.edu/docs/graphprop/#ogbg-mol",
        licence="MIT",
        citation=_OGB,
        official=MolHiv("ogbg-molhiv", "csv_mol_download/hiv", "scaffold"),
        metric="rocauc",
        synthetic=MoleculeBatch(size_cv=0.5),
        published=Published(num_tcbs=4_058),
        note="the first batch_size molecules in data set order; nodes and edges are those of 1024",
        **_BONDS,
    ),
    Dataset(
        name="ogbg-molpcba",
        task="graph",
        num_nodes=26_551,
        nnz=57_390,
        num_graphs=1_024,
        symmetric=True,
        num_classes=128,
        feature_dim=9,
        feature_cardinalities=_ATOM_CODES,
        homepage="https://ogb.stanford.edu/docs/graphprop/#ogbg-mol",
        licence="MIT",
        citation=_OGB,
        official=OgbGraphs("ogbg-molpcba", "csv_mol_download/pcba", "scaffold"),
        metric="ap",
        synthetic=MoleculeBatch(size_cv=0.25),
        published=Published(num_tcbs=5_029),
        **_BONDS,
    ),
    Dataset(
        name="ogbg-ppa",
        task="graph",
        num_nodes=249_242,
        nnz=5_418_294,
        num_graphs=1_024,
        symmetric=True,
        num_classes=37,
        feature_dim=_NO_FEATURES,
        edge_feature_dim=7,
        homepage="https://ogb.stanford.edu/docs/graphprop/#ogbg-ppa",
        licence="CC-0",
        citation=_OGB,
        official=OgbGraphs("ogbg-ppa", "ogbg_ppi_medium", "species", node_features=False),
        metric="accuracy",
        synthetic=DenseBatch(),
        published=Published(num_tcbs=254_080),
        note="the original has no node features; random ones are used",
        repeats=5,
    ),
    Dataset(
        name="ogbg-code2",
        task="graph",
        num_nodes=110_946,
        nnz=109_922,
        num_graphs=1_024,
        symmetric=False,
        num_classes=5_002,
        feature_dim=2,
        feature_cardinalities=(98, 10_030),
        homepage="https://ogb.stanford.edu/docs/graphprop/#ogbg-code2",
        licence="MIT",
        citation=_OGB,
        official=OgbGraphs("ogbg-code2", "code2", "project", both_directions=False, labelled=False),
        synthetic=SyntaxTreeBatch(descent=0.6),
        published=Published(num_tcbs=16_371),
        note="one direction: a syntax node attends to its children; classes of one of five subtokens",
    ),
    Dataset(
        name="zinc",
        num_nodes=23_802,
        nnz=51_212,
        official=Zinc(),
        published=Published(num_tcbs=4_480),
        note="ZINC-12k, the first molecules of the train split",
        **_ZINC,
    ),
    Dataset(
        name="zinc12k-val-test",
        num_nodes=23_614,
        nnz=50_830,
        official=Zinc(("val", "test")),
        note="ZINC-12k, the molecules of the validation split, then those of the test split",
        **_ZINC,
    ),
    Dataset(
        name="peptides-func",
        num_classes=10,
        official=Peptides(
            "Peptides-func_1ca91230",
            LrgbFile(
                f"{_DROPBOX}/ol2v01usvaxbsr8/peptide_multi_class_dataset.csv.gz?dl=1",
                "peptide_multi_class_dataset.csv.gz",
                "701eb743e899f4d793f0e13c8fa5a1b4",
            ),
            LrgbFile(
                f"{_DROPBOX}/j4zcnx2eipuo0xz/splits_random_stratified_peptide.pickle?dl=1",
                "splits_random_stratified_peptide.pickle",
                "5a0114bdadc80b94fc7ae974f13ef061",
            ),
        ),
        metric="ap",
        **_PEPTIDES,
    ),
    Dataset(
        name="peptides-struct",
        num_classes=11,
        official=Peptides(
            "Peptides-struc_806a68f7",
            LrgbFile(
                f"{_DROPBOX}/464u3303eu2u4zp/peptide_structure_dataset.csv.gz?dl=1",
                "peptide_structure_dataset.csv.gz",
                "9786061a34298a0684150f2e4ff13f47",
            ),
            LrgbFile(
                f"{_DROPBOX}/9dfifzft1hqgow6/splits_random_stratified_peptide_structure.pickle?dl=1",
                "splits_random_stratified_peptide_structure.pickle",
                "5a0114bdadc80b94fc7ae974f13ef061",
            ),
            _STRUCTURE,
        ),
        metric="mae",
        **_PEPTIDES,
    ),
    Dataset(
        name="pascalvoc-sp",
        task="node",
        num_nodes=491_004,
        nnz=2_776_074,
        num_graphs=1_024,
        symmetric=True,
        num_classes=21,
        feature_dim=14,
        edge_feature_dim=2,
        licence="terms of PASCAL VOC 2011",
        official=Superpixels(f"{_DROPBOX}/8x722ai272wqwl4/{_VOC}.zip?dl=1", _VOC, f"PascalVOC-SP_02e9d9be/{_PICTURES}"),
        metric="f1",
        synthetic=SuperpixelBatch(),
        published=Published(num_tcbs=234_447),
        note="the first pictures of the train split; a prediction for each superpixel",
        repeats=5,
        **_LRGB,
    ),
    Dataset(
        name="coco-sp",
        task="node",
        num_nodes=487_819,
        nnz=2_755_462,
        num_graphs=1_024,
        symmetric=True,
        num_classes=81,
        feature_dim=14,
        edge_feature_dim=2,
        licence="CC BY 4.0",
        official=Superpixels(
            f"{_DROPBOX}/r6ihg1f4pmyjjy0/{_COCO}.zip?dl=1", _COCO, f"COCO-SP_9838e994/{_PICTURES}", COCO_CATEGORIES
        ),
        metric="f1",
        synthetic=SuperpixelBatch(),
        published=Published(num_tcbs=233_369),
        note="the first pictures of the train split; a prediction for each superpixel",
        repeats=5,
        **_LRGB,
    ),
)
