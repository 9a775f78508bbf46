"""Neighbourhoods on the sphere, as in the attention of torch-harmonics. They are exact by definition: no file is read.

A[i, j] = 1 if key j is within a geodesic distance of query i. Both are points of equiangular grids with poles:

    colatitude  pi * h / (nlat - 1), h = 0 .. nlat - 1        longitude  2 pi * w / nlon, w = 0 .. nlon - 1

Point (h, w) is node h * nlon + w. As `NeighborhoodAttentionS2` of torch-harmonics does, the distance is compared with
1.001 times the cutoff. The neighbourhood of a query at longitude w is that of longitude 0, turned by w.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource

CUTOFF_MARGIN = 1.001  # `theta_eps` of torch-harmonics


@dataclass(frozen=True)
class Sphere(OfficialSource):
    """Attention from each point of a grid to its neighbours on the same grid, or on a finer one.

    Attributes:
        nlat, nlon: grid of the queries.
        cutoff: radius of a neighbourhood in radians.
        keys: (nlat, nlon) of the keys' grid; None: that of the queries.
    """

    nlat: int
    nlon: int
    cutoff: float
    keys: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for nlat, nlon in ((self.nlat, self.nlon), self.key_grid):
            if nlat < 2 or nlon < 1:
                raise ValueError(f"grid: got {nlat} x {nlon}; 2 latitudes (the poles) and 1 longitude are the least")
        if self.key_grid[1] % self.nlon:
            raise ValueError(
                f"keys: got {self.key_grid[1]} longitudes; a multiple of the queries' {self.nlon} is needed, so that "
                "a turn of the queries' grid is one of the keys'"
            )
        if not 0 < self.cutoff <= np.pi:
            raise ValueError(f"cutoff: got {self.cutoff}; radians above 0 and up to pi are allowed")

    @property
    def key_grid(self) -> tuple[int, int]:
        """(nlat, nlon) of the keys."""
        return self.keys or (self.nlat, self.nlon)

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        turn = self.key_grid[1] // self.nlon * np.arange(self.nlon)
        counts, cols = [], []
        for latitude in range(self.nlat):
            key_latitude, key_longitude = self._neighbours(latitude)
            turned = key_latitude * self.key_grid[1] + (key_longitude + turn[:, None]) % self.key_grid[1]
            cols.append(np.sort(turned.astype(np.int32), axis=1).ravel())
            counts.append(np.full(self.nlon, key_latitude.size))
        indptr = np.concatenate([[0], *counts]).cumsum().astype(np.int32)
        col = np.concatenate(cols)
        num_keys = None if self.keys is None else self.keys[0] * self.keys[1]
        return CsrGraph(indptr, col, self.rule, num_keys=num_keys)

    @property
    def rule(self) -> str:
        """The rule and its parameters, for `GraphMeta.origin`."""
        keys = "" if self.keys is None else f" to {self.keys[0]} x {self.keys[1]}"
        return f"neighbourhoods on the sphere, {self.nlat} x {self.nlon}{keys}, cutoff {self.cutoff}"

    def _neighbours(self, latitude: int) -> tuple[np.ndarray, np.ndarray]:
        """Latitudes and longitudes [k] int64 of the keys of the query at this latitude and longitude 0."""
        nlat, nlon = self.key_grid
        query, keys = _colatitudes(self.nlat)[latitude], _colatitudes(nlat)[:, None]
        steps = np.arange(nlon)
        turns = np.cos(2 * np.pi * np.minimum(steps, nlon - steps) / nlon)  # east and west: the same bits
        distance = np.arccos(np.clip(np.cos(query) * np.cos(keys) + np.sin(query) * np.sin(keys) * turns, -1, 1))
        return np.nonzero(distance <= CUTOFF_MARGIN * self.cutoff)

    def quadrature_weights(self) -> np.ndarray:
        """[num_keys] float64: the share of each key in an integral over the sphere, 4 pi together. Clenshaw-Curtis
        weights of the latitudes times 2 pi / nlon."""
        nlat, nlon = self.key_grid
        last = nlat - 1
        order = np.arange(1, last // 2 + 1)
        factor = np.where(2 * order == last, 1, 2) / (4 * order**2 - 1)
        of_latitude = 2 * (1 - np.cos(2 * np.outer(_colatitudes(nlat), order)) @ factor) / last
        of_latitude[[0, -1]] /= 2
        return np.repeat(of_latitude * 2 * np.pi / nlon, nlon)


def _colatitudes(nlat: int) -> np.ndarray:
    return np.pi * np.arange(nlat) / (nlat - 1)
