"""The fragment maps of m16n8k16: bijections, and the table beside the MMA wrapper in cuda/ptx/mma.cuh."""

import re
from collections.abc import Callable
from itertools import product

from bench.fragments import a_element, b_element, c_element
from fused3s.runtime.device import WARP_SIZE
from fused3s.runtime.source import CUDA_FOLDER


def test_elements_are_bijections():
    def elements(function, *ranges):
        return sorted(function(*at) for at in product(range(WARP_SIZE), *ranges))

    assert elements(a_element, range(4), range(2)) == list(product(range(16), range(16)))
    assert elements(b_element, range(2), range(2)) == list(product(range(16), range(8)))
    assert elements(c_element, range(4)) == list(product(range(16), range(8)))


def table() -> list[str]:
    """The lines of the comment in cuda/ptx/mma.cuh."""

    def index(value: int, variable: str, factor: int, variable_value: int) -> str:
        offset = value - factor * variable_value
        name = f"{factor}{variable}" if factor > 1 else variable
        return f"{name}+{offset}" if offset else name

    lane = WARP_SIZE - 1  # g = 7 and t = 3 tell the variables and the offsets apart
    g, t = divmod(lane, 4)

    def operand(name: str, element: Callable[[int, int, int], tuple[int, int]], register: int, row_is_k: bool) -> str:
        cells = []
        for half in range(2):
            first, second = element(lane, register, half)
            if row_is_k:
                cells.append(f"{name}[{index(first, 't', 2, t)}][{index(second, 'g', 1, g)}]")
            else:
                cells.append(f"{name}[{index(first, 'g', 1, g)}][{index(second, 't', 2, t)}]")
        return f"{name}{register} = {', '.join(cells)}"

    lines = []
    for register in range(4):
        a = operand("A", a_element, register, row_is_k=False)
        b = operand("B", b_element, register, row_is_k=True) if register < 2 else ""
        row, column = c_element(lane, register)
        c = f"C{register} = C[{index(row, 'g', 1, g)}][{index(column, 't', 2, t)}]"
        lines.append(f"{a:<35}{b:<35}{c}")
    return lines


def test_comment_in_the_source_is_the_table_of_the_maps():
    source = (CUDA_FOLDER / "ptx" / "mma.cuh").read_text(encoding="utf-8")
    comment = [line.removeprefix("//").strip() for line in source.splitlines() if re.match(r"//\s+A\d = ", line)]
    assert comment == [line.strip() for line in table()]
