"""Fragment maps of m16n8k16: (lane, register) -> matrix element; `python kernels/fragments.py` prints them.

A warp has 32 lanes, g = lane // 4 and t = lane % 4. A 16-bit operand register holds two elements, `half` 0 and 1 (the
lower half first). A test compares the table in cuda/ptx/mma.cuh with the one printed here.
"""

from collections.abc import Callable

WARP_SIZE = 32


def a_element(lane: int, register: int, half: int) -> tuple[int, int]:
    """(row, k) of A [16, 16] in register 0 to 3."""
    g, t = divmod(lane, 4)
    return g + 8 * (register % 2), 2 * t + 8 * (register // 2) + half


def b_element(lane: int, register: int, half: int) -> tuple[int, int]:
    """(k, column) of B [16, 8] in register 0 or 1."""
    g, t = divmod(lane, 4)
    return 2 * t + 8 * register + half, g


def c_element(lane: int, register: int) -> tuple[int, int]:
    """(row, column) of C [16, 8] in register 0 to 3."""
    g, t = divmod(lane, 4)
    return g + 8 * (register // 2), 2 * t + register % 2


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


if __name__ == "__main__":
    print("\n".join(table()))
