"""Fragment maps of m16n8k16: (lane, register) -> matrix element.

A warp has 32 lanes, g = lane // 4 and t = lane % 4. A 16-bit operand register holds two elements, `half` 0 and 1 (the
lower half first). A test compares the table in kernels/cuda/ptx/mma.cuh with these maps.
"""


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
