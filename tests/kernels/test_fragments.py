"""The fragment maps of m16n8k16: bijections, and the table beside the MMA wrapper in cuda/ptx/mma.cuh."""

import re
from itertools import product

from fused3s.fragments import WARP_SIZE, a_element, b_element, c_element, table
from fused3s.runtime.source import CUDA_FOLDER


def test_elements_are_bijections():
    def elements(function, *ranges):
        return sorted(function(*at) for at in product(range(WARP_SIZE), *ranges))

    assert elements(a_element, range(4), range(2)) == list(product(range(16), range(16)))
    assert elements(b_element, range(2), range(2)) == list(product(range(16), range(8)))
    assert elements(c_element, range(4)) == list(product(range(16), range(8)))


def test_comment_in_the_source_is_the_printed_table():
    source = (CUDA_FOLDER / "ptx" / "mma.cuh").read_text(encoding="utf-8")
    comment = [line.removeprefix("//").strip() for line in source.splitlines() if re.match(r"//\s+A\d = ", line)]
    assert comment == [line.strip() for line in table()]
