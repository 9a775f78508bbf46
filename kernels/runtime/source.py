"""Text of the CUDA sources."""

import re
from functools import lru_cache
from pathlib import Path

from ..terms.score_source import expression_source

CUDA_FOLDER = Path(__file__).parents[1] / "cuda"


EXPRESSION = "score/score_expression.cuh"


@lru_cache(128)  # up to 100 KiB each; new expressions take the places of old ones
def read_source(source: str | Path, score: str | None = None) -> str:
    """Text of a CUDA source with its headers (`#include "..."`, in its folder or kernels/cuda) inlined, those with
    `#pragma once` once each.

    Args:
        score: normalised expression of a score term, whose C++ takes the place of score_expression.cuh.
    """
    pasted: set[str] = set()
    source = CUDA_FOLDER / source

    def paste(name: str) -> str:
        if name in pasted:
            return ""
        path = next(each / name for each in (source.parent, CUDA_FOLDER) if (each / name).exists())
        text = path.read_text(encoding="utf-8") if score is None or name != EXPRESSION else expression_source(score)
        if "#pragma once\n" in text:  # members of several structs have none
            pasted.add(name)
            text = text.replace("#pragma once\n", "")
        return re.sub(r'^#include "(.+)"$', lambda include: paste(include[1]), text, flags=re.MULTILINE)

    return paste(source.name)
