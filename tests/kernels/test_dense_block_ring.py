"""The ring of weight tiles of cuda/dense_block.cu, under every interleaving that a random schedule finds."""

import random
from itertools import product

import pytest
from dense_cases import SPECS, order_of_slices

from kernels.dense_block import SLICE, DenseBlockSpec

WARPS = range(4)


class Barrier:
    """An mbarrier: phases end when all arrivals (and, for a copy, its bytes) are there."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phase = 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0, "more arrivals than the phase has"
        if self.pending == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Block:
    """Barriers and places of a block, and its actors: generators that yield where they may wait."""

    def __init__(self, spec: DenseBlockSpec, rounds: int, own_rounds: list[int]) -> None:
        self.spec, self.rounds, self.own_rounds = spec, rounds, own_rounds
        self.streamed, stages = spec.tiles - spec.resident, spec.shape.stages
        self.full = [Barrier(1) for _ in range(spec.resident + stages)]
        self.empty = [Barrier(4 * spec.shape.consumers * spec.shape.cluster) for _ in range(stages)]
        self.landed = [None] * len(self.full)  # [tile, parts that have landed]

    def actors(self, cluster: list["Block"]):
        yield self.producer(cluster)
        for consumer, _ in product(range(self.spec.shape.consumers), WARPS):
            yield self.warp(cluster, consumer)

    def streamed_before(self, tile: int) -> int:
        return tile * self.streamed // self.spec.tiles

    def is_streamed(self, tile: int) -> bool:
        return self.streamed_before(tile + 1) > self.streamed_before(tile)

    def place(self, tile: int) -> int:
        before = self.streamed_before(tile)
        return self.spec.resident + before % self.spec.shape.stages if self.is_streamed(tile) else tile - before

    def parity(self, tile: int, round_: int) -> int:
        stages = self.spec.shape.stages
        return (self.streamed_before(tile) // stages + round_ * (self.streamed // stages)) % 2

    def producer(self, cluster: list["Block"]):
        """Its part of every tile goes to all blocks of the cluster, each of which arrives for its own barrier."""
        for round_, tile in product(range(self.rounds), range(self.spec.tiles)):
            place = self.place(tile)
            if self.is_streamed(tile):
                while not self.empty[place - self.spec.resident].is_over(self.parity(tile, round_) ^ 1):
                    yield "wait"
            elif round_:
                continue
            self.land(place, tile, len(cluster))
            yield "go"
            for block in cluster:
                block.land(place, tile, len(cluster))
                yield "go"

    def land(self, place: int, tile: int, parts: int) -> None:
        """A part, or the arrival of the block's own producer, which parts of its peers may precede."""
        if self.landed[place] is None or self.landed[place][1] == "whole":
            self.landed[place] = [tile, 0]
        assert self.landed[place][0] == tile, "two tiles in a place"
        self.landed[place][1] += 1
        if self.landed[place][1] == parts + 1:
            self.landed[place][1] = "whole"
            self.full[place].arrive()

    def warp(self, cluster: list["Block"], consumer: int):
        spec = self.spec

        def release(place: int) -> None:
            for block in cluster if place >= spec.resident else ():
                block.empty[place - spec.resident].arrive()

        for round_ in range(self.rounds):
            if round_ >= self.own_rounds[consumer]:
                for tile in filter(self.is_streamed, range(spec.tiles)):
                    while not self.full[self.place(tile)].is_over(self.parity(tile, round_)):
                        yield "wait"
                    release(self.place(tile))
                    yield "go"
                continue
            running, held = [], set()  # products that may not be over; tiles whose places are held
            for action, argument in program(spec):
                place = self.place(argument) if action in ("acquire", "release") else None
                if action == "wait":
                    del running[: max(0, len(running) - argument)]
                elif action == "release":
                    assert argument not in running, "released while it may be read"
                    assert self.landed[place] == [argument, "whole"], "overwritten while it was held"
                    held.remove(argument)
                    release(place)
                elif action == "acquire":
                    expected = self.parity(argument, round_) if self.is_streamed(argument) else 0
                    while not self.full[place].is_over(expected):
                        yield "wait"
                    assert self.landed[place] == [argument, "whole"], "not the tile that comes next"
                    held.add(argument)
                    running.append(argument)
                yield "go"
            assert not held
            assert not running


def program(spec: DenseBlockSpec) -> list[tuple[str, int]]:
    """What a consumer warp does with tiles in a round, as the kernel has it."""
    out, slices, qkv = spec.dim // SLICE, 2 * spec.dim // SLICE, 3 * spec.dim // SLICE if spec.has_next else 0
    up, down = order_of_slices(spec.dim, spec.shape.shared_h1)
    actions = []
    for i in range(out):
        actions.append(("acquire", i))
        if i > 0:
            actions += [("wait", 1), ("release", i - 1)]
    actions += [("wait", 0), ("release", out - 1), ("acquire", up[0])]
    for i in range(slices):
        last = i + 1 == slices
        if spec.shape.shared_h1:
            actions += [("wait", 0), ("release", up[i]), ("acquire", down[i])]
            if not last:
                actions += [("acquire", up[i + 1]), ("wait", 1), ("release", down[i])]
        else:
            if not last:
                actions.append(("acquire", up[i + 1]))
            actions.append(("wait", 1 if i == 0 or last else 2))
            if i > 1:
                actions.append(("release", down[i - 2]))
            actions += [("release", up[i]), ("acquire", down[i])]
    actions.append(("wait", 0))
    if not spec.shape.shared_h1:
        actions.append(("release", down[slices - 2]))
    actions.append(("release", down[slices - 1]))
    first = out + 2 * slices
    if qkv:
        actions.append(("acquire", first))
    for i in range(qkv):
        if i + 1 < qkv:
            actions += [("acquire", first + i + 1), ("wait", 1)]
        else:
            actions.append(("wait", 0))
        actions.append(("release", first + i))
    return actions


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dim}-{spec.has_next}")
def test_tiles_are_taken_in_the_order_in_which_they_come(spec):
    assert [argument for action, argument in program(spec) if action == "acquire"] == list(range(spec.tiles))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dim}-{spec.has_next}")
@pytest.mark.parametrize("seed", range(4))
def test_ring_neither_hangs_nor_overwrites(spec, seed):
    """Every actor runs in bursts of random length; some consumers have a round less than the others, or none."""
    rng = random.Random(seed)
    rounds, shape = (1, 4, 4, 3)[seed], spec.shape
    full = rng.randrange(1, shape.consumers * shape.cluster + 1) if seed else shape.consumers * shape.cluster
    own_rounds = [rounds if i < full else rounds - 1 for i in range(shape.consumers * shape.cluster)]
    cluster = [Block(spec, rounds, own_rounds[rank :: shape.cluster]) for rank in range(shape.cluster)]
    running = [actor for block in cluster for actor in block.actors(cluster)]
    waiting = set()
    actors = set(range(len(running)))
    while actors:
        actor = rng.choice(sorted(actors - waiting) or ["hung"])
        assert actor != "hung", f"{len(actors)} actors wait for each other"
        for _ in range(rng.choice((1, 1, 100))):
            try:
                state = next(running[actor])
            except StopIteration:
                actors.remove(actor)
                waiting.clear()
                break
            if state == "wait":
                waiting.add(actor)
                break
            waiting.clear()
