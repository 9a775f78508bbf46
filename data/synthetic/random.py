"""Random numbers with equal bits on the CPU (NumPy) and the GPU (CuPy): a hash of (seed, stream, position)."""

from typing import Any


def random_bits(xp: Any, seed: int, stream: int, count: int) -> Any:
    """[count] int64, uniform in 0 .. 2^63 - 1: splitmix64 of the position, started from seed and stream.

    Args:
        xp: `numpy` or `cupy`.
        seed: any non-negative integer.
        stream: separates the draws of one seed.
        count: how many numbers.
    """
    return random_bits_at(xp, seed, stream, xp.arange(count, dtype=xp.int64))


def random_bits_at(xp: Any, seed: int, stream: int, positions: Any) -> Any:
    """The numbers of `random_bits` at the given positions.

    Args:
        positions: [n] int64, 0 or more.

    Returns:
        [n] int64.
    """
    z = positions.astype(xp.uint64)
    z *= xp.uint64(0x9E3779B97F4A7C15)
    z += xp.uint64(_mix(_mix(seed) ^ stream))
    z ^= z >> xp.uint64(30)
    z *= xp.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> xp.uint64(27)
    z *= xp.uint64(0x94D049BB133111EB)
    z ^= z >> xp.uint64(31)
    z >>= xp.uint64(1)  # the highest bit of the result is 0
    return z.view(xp.int64)


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


def _mix(value: int) -> int:
    """splitmix64's finaliser for one Python integer."""
    mask = 2**64 - 1
    z = value * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31
