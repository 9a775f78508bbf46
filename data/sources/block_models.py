"""PATTERN and CLUSTER of Dwivedi et al. (2020, "Benchmarking Graph Neural Networks"): classify the nodes of graphs
drawn from stochastic block models. The graphs follow the definition of the published ones, and are not the same graphs.

Two nodes of a block are joined with probability p, two of different blocks with q. A block has 5 to 34 nodes, and the
nodes of a graph are numbered at random.

PATTERN  5 blocks, p = 0.5, q = 0.35, and a pattern: one more block, joined to each other node with probability 0.5. Its
         size, inner edges (p = 0.5) and features are those of one of 100 patterns, which have equal shares of each
         split. A feature is one of 3 symbols at random; the label says whether a node is in the pattern.
CLUSTER  6 blocks, p = 0.55, q = 0.25. The feature is the number of the block (1 to 6) for one node of each block, and 0
         for the others; the label is the block.

Random numbers are hashes of seed, graph and position: a graph is the same on any machine and in any batch.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse

from data.graph import CsrGraph
from data.packed import consecutive, rows_of
from data.selection import PART_OF, Selection, renumbered
from data.sources.base import OfficialSource
from data.synthetic.random import random_bits, shuffled

LEAST, MOST = 5, 34  # nodes of a block
STREAMS = 4  # random-number streams per graph
SIZES, EDGES, FEATURES, ORDER = range(4)


@dataclass(frozen=True)
class BlockModels(OfficialSource):
    """Graphs of one distribution.

    Attributes:
        num_train: graphs of the training split, the first ones.
        num_held_out: graphs of the validation split, which follow, and of the test split.
        seed: chooses the graphs.
    """

    num_train: int
    num_held_out: int
    seed: int = 0

    @abstractmethod
    def graph(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Graph `number` of the collection, of n nodes: adjacency bool [n, n], features [n] int64, labels [n] int64."""

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        counts = {"train": self.num_train, "val": self.num_held_out, "test": self.num_held_out}
        chosen = {split: counts[split] for split in selection.split_or(("train",))}
        ids = consecutive(counts)
        numbers = np.concatenate([ids[PART_OF[split]] for split in chosen])
        picked, available = selection.pick(numbers.size, f"{selection.name}, {' and '.join(chosen)}")
        adjacencies, features, labels = zip(*(self.graph(number) for number in numbers[picked].tolist()), strict=True)
        sizes = np.array([label.size for label in labels])
        matrix = scipy.sparse.block_diag([*map(scipy.sparse.csr_array, adjacencies)], "csr")
        graphs = renumbered(consecutive(chosen), picked, numbers.size)
        return CsrGraph(
            matrix.indptr.astype(np.int32),
            matrix.indices.astype(np.int32),
            selection.described(f"stochastic block models of seed {self.seed}"),
            graph_sizes=sizes,
            ndata={"feat": np.concatenate(features)[:, None], "label": np.concatenate(labels)},
            splits={part: np.sort(rows_of(ids, sizes)) for part, ids in graphs.items()},
            graph_ids=picked,
            collection_size=available,
        )

    def _bits(self, number: int, purpose: int, count: int) -> np.ndarray:
        """[count] int64 in 0 .. 2^63 - 1."""
        return random_bits(np, self.seed, STREAMS * number + purpose, count)

    def _sizes(self, number: int, purpose: int, count: int) -> np.ndarray:
        """Nodes of `count` blocks."""
        return LEAST + self._bits(number, purpose, count) % (MOST - LEAST + 1)

    def _joined(self, number: int, purpose: int, probability: np.ndarray) -> np.ndarray:
        """A symmetric adjacency without self-loops, bool [n, n]; of the probabilities [n, n] those above the diagonal
        count."""
        upper = np.triu_indices(len(probability), 1)
        adjacency = np.zeros(probability.shape, bool)
        adjacency[upper] = self._bits(number, purpose, upper[0].size) < probability[upper] * 2.0**63
        return adjacency | adjacency.T

    def _renumbered(
        self, number: int, adjacency: np.ndarray, features: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The graph with its nodes in random order."""
        order = shuffled(np, np.arange(labels.size), self.seed, STREAMS * number + ORDER)
        return adjacency[np.ix_(order, order)], features[order], labels[order]


class SbmPattern(BlockModels):
    """PATTERN."""

    blocks, within, between, of_pattern, symbols, patterns = 5, 0.5, 0.35, 0.5, 3, 100

    def graph(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        block = np.repeat(np.arange(self.blocks), self._sizes(number, SIZES, self.blocks))
        inner, symbols = self._pattern(number)
        label = np.repeat([0, 1], [block.size, symbols.size])
        block = np.append(block, np.full(symbols.size, self.blocks))
        probability = np.where(block == block[:, None], self.within, self.between)
        probability[label == 1] = probability[:, label == 1] = self.of_pattern
        adjacency = self._joined(number, EDGES, probability)
        adjacency[np.ix_(label == 1, label == 1)] = inner
        features = np.append(self._bits(number, FEATURES, int((label == 0).sum())) % self.symbols, symbols)
        return self._renumbered(number, adjacency, features, label)

    def _pattern(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inner edges and features of a graph's pattern."""
        place, of = number, self.num_train
        if number >= self.num_train:
            place, of = (number - self.num_train) % self.num_held_out, self.num_held_out
        # Numbers behind those of the graphs.
        pattern = self.num_train + 2 * self.num_held_out + place * self.patterns // of
        size = int(self._sizes(pattern, SIZES, 1)[0])
        inner = self._joined(pattern, EDGES, np.full((size, size), self.of_pattern))
        return inner, self._bits(pattern, FEATURES, size) % self.symbols


class SbmCluster(BlockModels):
    """CLUSTER."""

    blocks, within, between = 6, 0.55, 0.25

    def graph(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = self._sizes(number, SIZES, self.blocks)
        block = np.repeat(np.arange(self.blocks), sizes)
        adjacency = self._joined(number, EDGES, np.where(block == block[:, None], self.within, self.between))
        features = np.zeros(block.size, np.int64)
        known = np.cumsum(sizes) - sizes + self._bits(number, FEATURES, self.blocks) % sizes
        features[known] = np.arange(1, self.blocks + 1)
        return self._renumbered(number, adjacency, features, block)
