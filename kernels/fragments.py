"""Which matrix element each lane's register holds in m16n8k16, as functions; `python -m fragments` prints them.

A warp has 32 lanes, g = lane // 4 and t = lane % 4. A 16-bit operand register holds two elements, `half` 0 and 1 (the
lower half first). The maps are what cuda/mma.cuh and cuda/fused3s_paper.cu are written from; a test emulates the kernel
with them, lane by lane, and compares the tables in the comments with the ones printed here.
"""

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


def sddmm_dimension(step: int, k: int, permuted: bool) -> int:
    """Head dimension that SDDMM multiplies at index `k` (0 to 15) of k-step `step`, the same for Q and K.

    Permuted (the paper's register remapping), the four words that lane t needs for steps 2s and 2s + 1 are neighbours
    in memory, 16 bytes from dimension 32s + 8t on.
    """
    if not permuted:
        return 16 * step + k
    pair, odd = divmod(step, 2)
    register, t, half = k // 8, k % 8 // 2, k % 2
    return 32 * pair + 8 * t + 4 * odd + 2 * register + half


def spmm_dimension(block: int, n_tile: int, column: int, permuted: bool) -> int:
    """Head dimension of `column` (0 to 7) of n-tile 0 or 1 in output block `block` of 16 dimensions.

    Permuted, the two n-tiles interleave: lane g reads dimensions 16i + 2g and 16i + 2g + 1 of V in one 4-byte load, and
    a lane's C registers of one row are four neighbours, written in one store.
    """
    return 16 * block + (2 * column + n_tile if permuted else 8 * n_tile + column)


def swapped_spmm_dimension(block: int, m: int) -> int:
    """Head dimension of row `m` (0 to 15) of A = V^T in output block `block` of cuda/flashsparse.cu, which computes
    O^T = V^T P^T: rows g and g + 8 are neighbours in memory, so that one 4-byte load of V fills both."""
    return 16 * block + 2 * (m % 8) + m // 8


def table() -> list[str]:
    """The lines of the comment in cuda/mma.cuh."""

    def index(value: int, variable: str, factor: int, variable_value: int) -> str:
        offset = value - factor * variable_value
        name = f"{factor}{variable}" if factor > 1 else variable
        return f"{name}+{offset}" if offset else name

    lane = WARP_SIZE - 1  # g = 7 and t = 3 tell the variables and the offsets apart
    g, t = divmod(lane, 4)

    def operand(name: str, element, register: int, row_is_k: bool) -> str:
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
