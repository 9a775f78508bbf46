"""Entries of the sequence masks, which are graphs by definition; see `data.sources.sequence_masks`."""

from data.registry.entry import Dataset
from data.sources.sequence_masks import BigBird, Longformer
from data.synthetic.generate import NoSurrogate

_MASK = {
    "task": "node",
    "num_classes": 2,
    "feature_dim": 64,  # of a head, in all of these models
    "licence": "none: a definition",
    "synthetic": NoSurrogate("the mask is exact by definition: source='official' makes it without any file"),
}
_LONGFORMER = {
    "symmetric": True,
    "homepage": "https://arxiv.org/abs/2004.05150",
    "citation": "Beltagy, Peters, Cohan: Longformer: The Long-Document Transformer, arXiv:2004.05150, 2020",
}
_BIGBIRD = {
    "symmetric": False,
    "homepage": "https://arxiv.org/abs/2007.14062",
    "citation": "Zaheer et al.: Big Bird: Transformers for Longer Sequences, NeurIPS 2020",
}

MASKS = (
    Dataset(
        name="longformer-4096",
        num_nodes=4_096,
        nnz=2_043_134,
        official=Longformer(4_096, window=512),
        note="longformer-base-4096, classification: window 512, the first token global; random features",
        **_LONGFORMER,
        **_MASK,
    ),
    Dataset(
        name="longformer-16384",
        num_nodes=16_384,
        nnz=16_562_686,
        official=Longformer(16_384, window=1_024),
        note="encoder of led-base-16384, summarization: window 1024, the first token global; random features",
        **_LONGFORMER,
        **_MASK,
    ),
    Dataset(
        name="bigbird-4096",
        num_nodes=4_096,
        nnz=2_547_712,
        official=BigBird(4_096),
        note="BigBird-base, one head: blocks of 64, window 3, global 2, random 3; random features",
        **_BIGBIRD,
        **_MASK,
    ),
    Dataset(
        name="bigbird-16384",
        num_nodes=16_384,
        nnz=10_412_032,
        official=BigBird(16_384),
        note="bigbird-4096 with a longer sequence: no model of that length is published; random features",
        **_BIGBIRD,
        **_MASK,
    ),
)
