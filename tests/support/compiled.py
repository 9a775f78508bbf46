"""Instances compiled without a GPU, held to registers and spills on every architecture that the library supports."""

import re
from collections.abc import Callable, Iterable

import torch
from ptxas import compile_ptxas

from fused3s.runtime.jit import KernelInstance

# sm_90 is the one that the library compiles for on an H100; the dense block takes sm_90a (tests/models/dense).
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"]
MOST_SHARED_BYTES = 48 * 1024  # static, of a block
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
TYPES = [(HALF, FLOAT), (BFLOAT, BFLOAT), (HALF, HALF), (BFLOAT, FLOAT)]

Budget = int | Callable[[KernelInstance], int]

# Instances that spill nevertheless: a pattern of name and expression, architectures, most bytes; as in docs/gpus.md.
SPILLS = (
    (r"fused3s<.*, 256, 1, 2, 6, 1>", "sm_90", 40),
    (r"fused3s<.*, 256, 1, 2, 16, 1> .*", "sm_90", 8),
    (r"fused3s_backward<.*, 256, true, 2, 4, 8>", "sm_1[02].", 16),
    (r"fused3s_backward<.*kFloat, 128, false, 2, [24], 8>", "sm_90|sm_10.", 8),
    (r"fused3s_backward<.*kFloat, 256, false, 4, [48], [08]>", "sm_1..", 16),
    (r"fused3s_backward<.*, (128|256), true, [12], \d, 16> .*", "sm_1..", 124),
    (r"fused3s_edges<.*, 16, 8, 6>", "sm_12.", 16),
    (r"fused3s_edges<.*kFloat, 8, 8, 393>", "sm_12.", 24),
    (r"fused3s_edges<.*, 1[0-4], (8|16), 0>", "sm_1..", 8),
    (r"plan_parts", "sm_12.", 16),
    (r"residual_norm_backward<.*, 128>", "sm_8[69]", 12),
    (r"fused3s_paper<.*, true>", "sm_10.", 52),  # with clocks
)


def in_turn(shapes: Iterable, arch: str, shift: int = 0) -> list[tuple]:
    """The shapes to compile for `arch`, each with types of inputs and output; all architectures together have each."""
    turns = enumerate(shapes, shift)
    return [
        (shape, TYPES[index % len(TYPES)])
        for index, shape in turns
        if ARCHS[(index + index // len(ARCHS)) % len(ARCHS)] == arch
    ]


def check(instances: Iterable[KernelInstance], arch: str, registers: Budget, spill_bytes: Budget = 0) -> None:
    """Compile; the limits are numbers, or functions of an instance. SPILLS has further bytes."""
    of_source: dict[tuple, list[KernelInstance]] = {}
    for instance in sorted(set(instances), key=lambda instance: instance.name):
        of_source.setdefault((instance.source, instance.score), []).append(instance)
    for each in of_source.values():
        for instance, report in compile_ptxas(each, arch).items():
            name = f"{instance.name} {instance.score or ''}".strip()
            most, spilt = (of(instance) if callable(of) else of for of in (registers, spill_bytes))
            known = [few for text, archs, few in SPILLS if re.fullmatch(text, name) and re.fullmatch(archs, arch)]
            assert 0 < report.registers <= most, (arch, name, report)
            assert report.spill_bytes <= max(spilt, *known, 0), (arch, name, report)
            assert report.shared_bytes <= MOST_SHARED_BYTES, (arch, name, report)
