"""Facebook100: the friendships at one university, a MATLAB file with the symmetric matrix `A`.

`local_info` (gender, major, dormitory and so on of each person) is not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, reading

REPOSITORY = "https://github.com/CUAI/Non-Homophily-Large-Scale/raw/master/data/facebook100"  # as PyG's LINKXDataset


@dataclass(frozen=True)
class Facebook100(OfficialSource):
    """One university.

    Attributes:
        university: name of the file without `.mat`.
    """

    university: str

    def files(self, root: Path) -> Sequence[Remote]:
        name = f"{self.university}.mat"
        return [Remote(f"{REPOSITORY}/{name}", root / "facebook100" / name)]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        import scipy.io

        (remote,) = self.files(root)
        with reading(remote.target):
            matrix = scipy.io.loadmat(remote.target, variable_names=["A"])["A"]
            matrix.check_format(full_check=True)  # SciPy's conversions trust the arrays
            matrix = matrix.tocoo()
            if matrix.shape[0] != matrix.shape[1]:
                raise ValueError(f"A has shape {matrix.shape}; a square matrix is needed")
        row, col = (ids.astype(np.int64) for ids in (matrix.row, matrix.col))
        return RawGraph(row, col, matrix.shape[0], remote.url)
