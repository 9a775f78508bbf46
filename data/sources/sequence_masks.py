"""Attention masks of sequence transformers. They are exact by definition: no file is read.

A node is a token. A[i, j] = 1 if token i (query) attends to token j (key).

Longformer (Beltagy, Peters, Cohan: Longformer: The Long-Document Transformer, 2020, https://arxiv.org/abs/2004.05150,
section 3.1). Every token attends to window / 2 tokens on each side and to itself. Global attention is symmetric: the
first token ([CLS] or <s>) attends to all tokens, and all tokens attend to it. Windows: `attention_window` in the
`config.json` of `allenai/longformer-base-4096` (512) and of the encoder of `allenai/led-base-16384` (1,024).

BigBird (Zaheer et al.: Big Bird: Transformers for Longer Sequences, NeurIPS 2020, https://arxiv.org/abs/2007.14062,
section 2 and the appendix on the implementation). The rule holds for blocks of tokens; a block attends to

    global   all blocks, if it is the first or the last one; every block attends to these two (BigBird-ITC)
    window   itself, the block before and the block after
    random   `random_blocks` distinct blocks that are in neither of the two; drawn per query block, one direction

BigBird-base has blocks of 64, 3 random blocks and 4,096 tokens: `block_size` and `num_random_blocks` in the
`config.json` of `google/bigbird-roberta-base`. No model of 16,384 tokens is published: that mask has the same
parameters. Random blocks are drawn from the whole sequence, as in the paper. `bigbird/core/attention.py` of
google-research/bigbird draws them from the first 1,024 tokens for sequences of 4,096, and anew for every head.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.canonical import to_csr
from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource


@dataclass(frozen=True)
class SequenceMask(OfficialSource):
    """A mask over a sequence of `num_tokens`."""

    num_tokens: int

    @abstractmethod
    def mask(self) -> np.ndarray:
        """[num_tokens, num_tokens] bool: whether a query attends to a key."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """The rule and its parameters, for `GraphMeta.origin`."""

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        return to_csr(*np.nonzero(self.mask()), self.num_tokens, self.rule)


@dataclass(frozen=True)
class Longformer(SequenceMask):
    """Sliding window of `window` neighbours, an even number, and the first token."""

    window: int

    @property
    def rule(self) -> str:
        return (
            f"Longformer mask (arXiv:2004.05150): {self.num_tokens} tokens, window {self.window} (half on each side), "
            "global tokens: the first 1"
        )

    def mask(self) -> np.ndarray:
        near = np.tri(self.num_tokens, k=self.window // 2, dtype=bool)
        mask = near & near.T
        mask[0] = mask[:, 0] = True
        return mask


@dataclass(frozen=True)
class BigBird(SequenceMask):
    """Sliding window, global blocks, and `random_blocks` of each query block but the first and the last; seed 0."""

    block: int = 64
    random_blocks: int = 3

    @property
    def rule(self) -> str:
        return (
            f"BigBird mask (arXiv:2007.14062): {self.num_tokens} tokens, blocks of {self.block}, window of 3 blocks, "
            f"first and last block global, {self.random_blocks} random blocks per query block from the whole sequence, "
            "seed 0"
        )

    def mask(self) -> np.ndarray:
        if self.num_tokens % self.block:
            raise ValueError(f"num_tokens: got {self.num_tokens}; a multiple of the block size {self.block} is needed")
        blocks = np.arange(self.num_tokens // self.block)
        mask = np.abs(blocks[:, None] - blocks) <= 1
        mask[:, [0, -1]] = mask[[0, -1]] = True
        rng = np.random.default_rng(0)
        for query in blocks[1:-1]:
            mask[query, rng.choice(np.flatnonzero(~mask[query]), self.random_blocks, replace=False)] = True
        return mask.repeat(self.block, 0).repeat(self.block, 1)
