"""cuda/dense_block.cu without a GPU: packing, swizzle and fragments emulated lane by lane against a dense block, and
what its instances need."""

from itertools import product

import numpy as np
import pytest
import torch
from dense_cases import EPS, SPECS, order_of_slices, parameters, reference

from kernels.dense_block import (
    BLOCK_SHARED_BYTES,
    SLICE,
    DenseBlockSpec,
    dense_block,
    dense_block_unavailable,
    dimension_of_column,
    image_of,
    pack_block,
)
from kernels.fragments import WARP_SIZE, a_element, c_element
from kernels.runtime.jit import compile_ptxas

LANES = range(WARP_SIZE)
WARPS = range(4)


class Emulator:
    """64 rows of a consumer; registers are arrays [warp, lane, register], in float64: nothing is rounded."""

    def __init__(self, spec: DenseBlockSpec) -> None:
        self.dim, self.shared_h1 = spec.dim, spec.shape.shared_h1
        self.h1 = np.full(64 * spec.dim, np.nan)  # shared memory of the consumer
        self.g, self.t = np.divmod(np.arange(WARP_SIZE), 4)

    def rows(self, r: int) -> np.ndarray:
        """[warp, lane]: row g + 8r of the warp's 16."""
        return 16 * np.arange(4)[:, None] + self.g + 8 * r

    def read_rows(self, matrix: np.ndarray) -> np.ndarray:
        """[warp, lane, word 2j + r, half] from 16-byte loads at 32s + 8t."""
        words = np.zeros((4, WARP_SIZE, self.dim // 4, 2))
        for r, s, w, b in product(range(2), range(self.dim // 32), range(4), range(2)):
            words[:, :, 8 * s + 2 * w + r, b] = matrix[self.rows(r), (32 * s + 8 * self.t + 2 * w + b)]
        return words

    def write_rows(self, words: np.ndarray, matrix: np.ndarray, column: int) -> None:
        for r, s, w, b in product(range(2), range(words.shape[2] // 8), range(4), range(2)):
            matrix[self.rows(r), column + 32 * s + 8 * self.t + 2 * w + b] = words[:, :, 8 * s + 2 * w + r, b]

    def vector(self, vector: np.ndarray) -> np.ndarray:
        """[lane, 4j + 2r + b] as with_vector reads it: eight neighbours at 32s + 8t."""
        out = np.zeros((WARP_SIZE, len(vector) // 2))
        for s, i in product(range(len(vector) // 32), range(16)):
            w, b = i // 4, i % 2
            out[:, 16 * s + i] = vector[32 * s + 8 * self.t + 2 * w + b]
        return out

    def attended_words(self, attended: np.ndarray) -> np.ndarray:
        """Read to registers at once, or piece by piece by way of the memory of h1."""
        words = self.read_rows(attended)
        if not self.shared_h1:
            return words
        for warp, lane, piece in product(WARPS, LANES, range(self.dim // 16)):
            row, column = 16 * warp + lane // 4 + 8 * (piece % 2), piece // 2 * 32 + 8 * (lane % 4)
            place = self.waiting_piece(warp, lane, piece) // 2
            assert 1024 * warp <= place % 4096 < 1024 * (warp + 1)  # h1 of the same warp's rows alone comes here
            assert np.isnan(self.h1[place : place + 8]).all()
            self.h1[place : place + 8] = attended[row, column : column + 8]
        waited = np.zeros_like(words)
        for warp, lane, piece in product(WARPS, LANES, range(self.dim // 16)):
            place = self.waiting_piece(warp, lane, piece) // 2
            first = piece // 2 * 8 + piece % 2
            waited[warp, lane, first : first + 8 : 2] = self.h1[place : place + 8].reshape(4, 2)
        return waited

    def waiting_piece(self, warp: int, lane: int, piece: int) -> int:
        return warp * 2048 + lane * 16 + piece // 4 * 8192 + piece % 4 * 512

    def store_h1(self, d: np.ndarray) -> None:
        """stmatrix: lane 8i + n gives the address of row n of matrix i, register i of lane 4n + t has elements 2t."""
        self.h1[:] = np.nan
        for warp, j in product(WARPS, range(0, self.dim // 8, 2)):
            addresses = []
            for lane in LANES:
                row = lane % 8 + lane // 8 % 2 * 8
                lane_row = (16 * warp + row) * 128 + (lane // 16 ^ row % 8) * 16
                addresses.append((lane_row ^ j % 8 * 16) + j // 8 * 8192)
            banks = [address // 4 % 32 for address in addresses]
            assert all(len(set(banks[8 * i : 8 * i + 8])) == 8 for i in range(4))
            for lane, i, b in product(LANES, range(4), range(2)):
                self.h1[addresses[8 * i + lane // 4] // 2 + 2 * (lane % 4) + b] = d[warp, lane, 4 * j + 2 * i + b]

    @staticmethod
    def panel(memory: np.ndarray, start: int, rows: int) -> np.ndarray:
        """[rows, 16]: a k-step of the panel at byte `start` with the hardware's swizzle."""
        out = np.zeros((rows, 16))
        for n, k in product(range(rows), range(16)):
            address = start + n // 8 * 1024 + n % 8 * 128 + 2 * k
            address ^= (address >> 7 & 7) << 4
            out[n, k] = memory[address // 2]
        return out

    def product(self, d: np.ndarray, a: np.ndarray | int, memory: np.ndarray, start: int) -> None:
        """D += A B: `a` are the four words of a k-step, or where it starts in h1, and B the panel at byte `start`."""
        columns = 2 * d.shape[2]
        b = self.panel(memory, start, columns).T
        for warp in WARPS:
            if isinstance(a, int):
                matrix = self.panel(self.h1, a, 64)[16 * warp : 16 * warp + 16]
            else:
                matrix = np.zeros((16, 16))
                for lane, register, half in product(LANES, range(4), range(2)):
                    matrix[a_element(lane, register, half)] = a[warp, lane, register, half]
            result = matrix @ b
            for lane, j, register in product(LANES, range(columns // 8), range(4)):
                row, column = c_element(lane, register)
                d[warp, lane, 4 * j + register] += result[row, 8 * j + column]

    def wide(self, d: np.ndarray, a: np.ndarray, tile: np.ndarray) -> None:
        for step in range(4):
            self.product(d, a[:, :, 4 * step : 4 * step + 4], tile, 32 * step)

    def tall(self, d: np.ndarray, a: np.ndarray | None, tile: np.ndarray) -> None:
        """A from registers, from h1 if None."""
        for step in range(self.dim // 16):
            start = step // 4 * SLICE * 128 + step % 4 * 32
            self.product(d, start if a is None else a[:, :, 4 * step : 4 * step + 4], tile, start)

    def layer_norm(self, d: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        def row_mean(x: np.ndarray) -> np.ndarray:
            """Means of the lane's two rows, spread over its registers."""
            sums = np.stack([x[:, :, np.arange(x.shape[2]) // 2 % 2 == r].sum(2) for r in range(2)], 2)
            sums = sums + sums[:, np.arange(WARP_SIZE) ^ 1]
            sums = sums + sums[:, np.arange(WARP_SIZE) ^ 2]
            return sums[:, :, np.arange(x.shape[2]) // 2 % 2] / self.dim

        d = d - row_mean(d)
        d = d / np.sqrt(row_mean(d * d) + EPS)
        return d * self.vector(weight) + self.vector(bias)

    def run(self, tiles: np.ndarray, vectors: np.ndarray, attended: np.ndarray, h: np.ndarray, has_next: bool):
        dim = self.dim
        out_b, norm1_w, norm1_b, up_b, down_b, norm2_w, norm2_b = np.split(vectors, np.cumsum([1, 1, 1, 2, 1, 1]) * dim)
        slices, first = 2 * dim // SLICE, dim // SLICE
        up, down = order_of_slices(dim, self.shared_h1)
        used = list(range(first))
        words = self.attended_words(attended)
        d = self.read_rows(h).reshape(4, WARP_SIZE, -1) + self.vector(out_b)
        for i in range(first):
            self.wide(d, words[:, :, 16 * i : 16 * i + 16], tiles[i])
        d = self.layer_norm(d, norm1_w, norm1_b)
        normed = d.reshape(4, WARP_SIZE, -1, 2)
        if self.shared_h1:
            self.store_h1(d)
            normed = None
        d = d + self.vector(down_b)
        for i in range(slices):
            hidden = np.zeros((4, WARP_SIZE, SLICE // 2)) + self.vector(up_b[i * SLICE : (i + 1) * SLICE])
            self.tall(hidden, normed, tiles[up[i]])
            self.wide(d, np.maximum(hidden, 0).reshape(4, WARP_SIZE, -1, 2), tiles[down[i]])
            used += [up[i], down[i]]
        d = self.layer_norm(d, norm2_w, norm2_b)
        normed = d.reshape(4, WARP_SIZE, -1, 2)
        h_next, qkv = np.full((64, dim), np.nan), None
        self.write_rows(normed, h_next, 0)
        if has_next:
            qkv = np.full((64, 3 * dim), np.nan)
            for i in range(3 * dim // SLICE):
                columns = np.zeros((4, WARP_SIZE, SLICE // 2))
                self.tall(columns, normed, tiles[len(used)])
                used.append(len(used))
                self.write_rows(columns.reshape(4, WARP_SIZE, -1, 2), qkv, SLICE * i)
        assert sorted(used) == list(range(len(tiles)))
        return h_next, qkv


@pytest.mark.parametrize(("dim", "has_next"), [(64, True), (64, False), (128, True), (256, False)])
def test_emulated_kernel_computes_the_block(dim, has_next):
    p = parameters(dim, has_next)
    packed = pack_block(**p)
    generator = torch.Generator().manual_seed(1)
    attended, h = (torch.randn(64, dim, generator=generator).half().double() for _ in range(2))
    outputs = Emulator(packed.spec).run(
        packed.weights.double().numpy(), packed.vectors.double().numpy(), attended.numpy(), h.numpy(), has_next
    )
    for output, expected in zip(outputs, reference(p, attended, h), strict=True):
        if expected is None:
            assert output is None
        else:
            np.testing.assert_allclose(output, expected.numpy(), atol=1e-9)


@pytest.mark.parametrize("size", [32, 64, 768])
def test_exchanged_dimensions_are_a_bijection_within_blocks_of_32(size):
    columns = dimension_of_column(size)
    assert sorted(columns.tolist()) == list(range(size))
    assert (columns // 32 == torch.arange(size) // 32).all()
    for lane in LANES:  # a lane's columns of four n-tiles are eight neighbours in memory
        t = lane % 4
        own = [int(columns[8 * j + c_element(lane, register)[1]]) for j in range(4) for register in range(2)]
        assert own == list(range(8 * t, 8 * t + 8))


@pytest.mark.parametrize(("rows", "k"), [(64, 64), (64, 256), (256, 64)])
def test_swizzled_image_holds_every_element_without_bank_conflicts(rows, k):
    image = image_of(torch.arange(rows * k).view(rows, k))
    assert sorted(image.tolist()) == list(range(rows * k))
    for n in range(8):
        assert int(image[64 * n + 8 * n]) == n * k  # element (n, 0): piece 0 at n
    pieces = image.view(-1, 8)[:, 0] % k // 8  # eight rows' piece 0 lie in eight different places
    assert sorted((torch.nonzero(pieces[:64] == 0).flatten() % 8).tolist()) == list(range(8))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dim}-{spec.has_next}")
def test_shared_memory_suffices(spec):
    assert spec.shared_bytes <= BLOCK_SHARED_BYTES
    assert (spec.tiles - spec.resident) % max(spec.shape.stages, 1) == 0  # a tile has the same place in every round
    assert spec.tile_bytes % 1024 == 0  # the swizzle needs panels on 1024 bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_instances_keep_everything_in_registers(dtype):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    specs = [DenseBlockSpec(dtype, spec.dim, spec.has_next) for spec in SPECS]
    for spec, report in compile_ptxas(specs, DenseBlockSpec.arch).items():
        assert report.registers == 65536 // spec.threads // 8 * 8, (spec.name, report)  # before they are moved
        assert report.spill_bytes == 0, (spec.name, report)
        assert not report.serialized, (spec.name, report)
        assert report.shared_bytes == 0, (spec.name, report)  # all of it is dynamic


@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [(torch.float32, 128, "torch.float32"), (torch.float16, 96, "96"), (torch.float16, 128, "cpu")],
)
def test_reasons_not_to_run(dtype, dim, reason):
    if reason == "cpu" and not torch.cuda.is_available():
        reason = "no NVIDIA GPU"
    assert reason in dense_block_unavailable(torch.device("cpu"), dtype, dim)


@pytest.mark.parametrize("name", ["out_b", "norm1_w", "up_w", "up_b", "down_w", "norm2_b", "next_qkv_w"])
def test_weights_that_do_not_fit_are_named(name):
    p = parameters(64, has_next=True)
    with pytest.raises(ValueError, match=name):
        pack_block(**p | {name: p[name][:-1]})
    with pytest.raises(ValueError, match=name):
        pack_block(**p | {name: p[name].float()})


def test_inputs_that_do_not_fit_are_named():
    packed = pack_block(**parameters(64, has_next=False))
    rows = torch.zeros(3, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="GPU"):
        dense_block(packed, rows, rows)
    with pytest.raises(ValueError, match="attended"):
        dense_block(packed, rows[:2], rows)
