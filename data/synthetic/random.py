"""Random numbers with equal bits on the CPU (NumPy) and the GPU (CuPy): a hash of (seed, stream, position)."""

from typing import Any

CHUNK = 1 << 18  # numbers per step on the CPU: 2 MiB stay in a core's cache


def random_bits(xp: Any, seed: int, stream: int, count: int) -> Any:
    """[count] int64, uniform in 0 .. 2^63 - 1: splitmix64 of the position, started from seed and stream.

    Args:
        xp: `numpy` or `cupy`.
        seed: any non-negative integer.
        stream: separates the draws of one seed.
        count: how many numbers.
    """
    start = _mix(_mix(seed) ^ stream)
    out = xp.empty(count, dtype=xp.uint64)
    step = CHUNK if xp.__name__ == "numpy" else max(count, 1)
    for first in range(0, count, step):
        z = xp.arange(first, min(first + step, count), dtype=xp.uint64)
        out[first : first + step] = _splitmix(xp, z, start)
    return out.view(xp.int64)


def random_bits_at(xp: Any, seed: int, stream: int, positions: Any) -> Any:
    """The numbers of `random_bits` at the given positions.

    Args:
        positions: [n] int64, 0 or more.

    Returns:
        [n] int64.
    """
    return _splitmix(xp, positions.astype(xp.uint64), _mix(_mix(seed) ^ stream)).view(xp.int64)


def shuffled(xp: Any, ids: Any, seed: int, stream: int) -> Any:
    """The ids in random order: a sort by random keys, which unlike a shuffle gives the same order on any device.

    Args:
        ids: [n] int64 in 0 .. 2^31 - 1.
    """
    key = random_bits(xp, seed, stream, ids.size)
    key &= ~xp.int64(2**31 - 1)
    key |= ids
    key.sort()
    key &= xp.int64(2**31 - 1)
    return key


def _splitmix(xp: Any, z: Any, start: int) -> Any:
    """Hash positions in place; [n] uint64, of which the highest bit is 0."""
    z *= xp.uint64(0x9E3779B97F4A7C15)
    z += xp.uint64(start)
    z ^= z >> xp.uint64(30)
    z *= xp.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> xp.uint64(27)
    z *= xp.uint64(0x94D049BB133111EB)
    z ^= z >> xp.uint64(31)
    z >>= xp.uint64(1)
    return z


def _mix(value: int) -> int:
    """splitmix64's finaliser for one Python integer."""
    mask = 2**64 - 1
    z = value * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31
