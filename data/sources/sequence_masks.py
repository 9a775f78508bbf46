"""Attention masks of sequence transformers. They are exact by definition: no file is read.

A node is a token. A[i, j] = 1 if token i (query) attends to token j (key).

Longformer (Beltagy, Peters, Cohan: Longformer: The Long-Document Transformer, 2020, https://arxiv.org/abs/2004.05150,
section 3.1). Every token attends to window / 2 tokens on each side and to itself. Global attention is symmetric: a
global token attends to all tokens, and all tokens attend to it.

    model                     tokens   window            global tokens
    longformer-base-4096       4,096      512    the first ([CLS], classification)
    led-base-16384, encoder   16,384    1,024    the first (<s>, summarization)

Windows: `attention_window` in the `config.json` of `allenai/longformer-base-4096` and `allenai/led-base-16384`.

BigBird (Zaheer et al.: Big Bird: Transformers for Longer Sequences, NeurIPS 2020, https://arxiv.org/abs/2007.14062,
section 2 and the appendix on the implementation). The rule holds for blocks of tokens; a block attends to

    global   all blocks, if it is the first or the last one; every block attends to these two (BigBird-ITC)
    window   itself, the block before and the block after
    random   `random_blocks` distinct blocks that are in neither of the two; drawn per query block, one direction

BigBird-base has blocks of 64, 3 random blocks and 4,096 tokens: `block_size` and `num_random_blocks` in the
`config.json` of `google/bigbird-roberta-base`. No model of 16,384 tokens is published: that mask has the same
parameters. Random blocks are drawn from the whole sequence, as in the paper. `bigbird/core/attention.py` of
google-research/bigbird draws them from the first 1,024 tokens for sequences of 4,096, and anew for every head.

Native Sparse Attention (Yuan et al., 2025, https://arxiv.org/abs/2502.11089, section 3.3.2), its selected branch: every
query attends to its own block of keys and to other selected blocks before it, 16 blocks of 64 keys together as in the
paper's experiments; inside its own block to the keys up to itself. Here the other blocks are drawn at random for each
query, where NSA takes those of the highest scores. One mask is the list of one KV head, which its query heads share.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.canonical import to_csr
from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote


@dataclass(frozen=True)
class SequenceMask(OfficialSource):
    """A mask over a sequence.

    Attributes:
        num_tokens: N.
    """

    num_tokens: int

    @abstractmethod
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """row, col: two [nnz] int64 arrays, every edge once, sorted by row and then column."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """The rule and its parameters, for `GraphMeta.origin`."""

    def files(self, root: Path) -> Sequence[Remote]:
        return ()

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        return to_csr(*self.edges(), self.num_tokens, self.rule)


@dataclass(frozen=True)
class Longformer(SequenceMask):
    """Sliding window and global tokens.

    Attributes:
        window: neighbours of a token in its window, an even number: half of them on each side.
        num_global: the first tokens, which are global.
    """

    window: int
    num_global: int = 1

    def __post_init__(self) -> None:
        if self.window < 0 or self.window % 2:
            raise ValueError(f"window: got {self.window}; an even number of 0 or more is needed")
        if not 0 <= self.num_global <= self.num_tokens:
            raise ValueError(f"num_global: got {self.num_global}; 0 to {self.num_tokens} is allowed")

    @property
    def rule(self) -> str:
        return (
            f"Longformer mask (arXiv:2004.05150): {self.num_tokens} tokens, window {self.window} (half on each side), "
            f"global tokens: the first {self.num_global}"
        )

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        tokens, global_tokens = np.arange(self.num_tokens), np.arange(self.num_global)
        others = tokens[self.num_global :, None]
        near = others + np.arange(-(self.window // 2), self.window // 2 + 1)
        everywhere = np.broadcast_to(global_tokens, (others.size, self.num_global))
        cols = np.concatenate([everywhere, near], axis=1)
        attends = np.concatenate([everywhere >= 0, (near >= self.num_global) & (near < self.num_tokens)], axis=1)
        rows = np.broadcast_to(others, cols.shape)
        return (
            np.concatenate([np.repeat(global_tokens, self.num_tokens), rows[attends]]),
            np.concatenate([np.tile(tokens, self.num_global), cols[attends]]),
        )


@dataclass(frozen=True)
class BigBird(SequenceMask):
    """Sliding window, global and random blocks.

    Attributes:
        block: tokens of a block.
        random_blocks: random key blocks of each query block but the first and the last.
        seed: of the random blocks; one seed is one mask.
    """

    block: int = 64
    random_blocks: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = 5 + self.random_blocks  # three blocks of the window, two global ones
        if self.num_tokens % self.block or self.num_tokens < least * self.block:
            raise ValueError(
                f"num_tokens: got {self.num_tokens}; a multiple of the block size {self.block} is needed, "
                f"{least * self.block} or more"
            )

    @property
    def rule(self) -> str:
        return (
            f"BigBird mask (arXiv:2007.14062): {self.num_tokens} tokens, blocks of {self.block}, window of 3 blocks, "
            f"first and last block global, {self.random_blocks} random blocks per query block from the whole sequence, "
            f"seed {self.seed}"
        )

    def block_mask(self) -> np.ndarray:
        """[N / block, N / block] bool: whether a query block attends to a key block."""
        blocks = np.arange(self.num_tokens // self.block)
        mask = np.abs(blocks[:, None] - blocks) <= 1
        mask[:, [0, -1]] = mask[[0, -1]] = True
        rng = np.random.default_rng(self.seed)
        for query in blocks[1:-1]:
            mask[query, rng.choice(np.flatnonzero(~mask[query]), self.random_blocks, replace=False)] = True
        return mask

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.arange(self.num_tokens).reshape(-1, self.block)
        keys = [tokens[attends].ravel() for attends in self.block_mask()]  # of each query block
        rows = [np.repeat(queries, cols.size) for queries, cols in zip(tokens, keys, strict=True)]
        return np.concatenate(rows), np.concatenate([np.tile(cols, self.block) for cols in keys])


@dataclass(frozen=True)
class SelectedBlocks(SequenceMask):
    """The own block, up to the query, and random blocks before it.

    Attributes:
        block: tokens of a block.
        selected: blocks of a query, its own included; all of them where there are fewer.
        seed: of the random blocks; one seed is one mask.
    """

    block: int = 64
    selected: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens % self.block:
            raise ValueError(f"num_tokens: got {self.num_tokens}; a multiple of the block size {self.block} is needed")
        if self.selected < 1:
            raise ValueError(f"selected: got {self.selected}; 1 is the least, the own block")

    @property
    def rule(self) -> str:
        return (
            f"selected blocks of NSA (arXiv:2502.11089): {self.num_tokens} tokens, {self.selected} blocks of "
            f"{self.block}, the own one and random ones before it, causal, seed {self.seed}"
        )

    def block_mask(self) -> np.ndarray:
        """[N, N / block] bool: the blocks of each query."""
        blocks = np.arange(self.num_tokens // self.block)
        own = np.repeat(blocks, self.block)[:, None]
        draw = np.random.default_rng(self.seed).random((self.num_tokens, blocks.size))
        draw[blocks >= own] = 2
        draw[blocks == own] = -1
        most = np.sort(draw, axis=1)[:, [min(self.selected, blocks.size) - 1]]
        return draw <= np.minimum(most, 1)

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        query, block = np.nonzero(self.block_mask())
        cols = block[:, None] * self.block + np.arange(self.block)
        attends = cols <= query[:, None]
        return np.broadcast_to(query[:, None], cols.shape)[attends], cols[attends]
