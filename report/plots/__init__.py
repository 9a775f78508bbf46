"""Figures. Each module has `draw(rows)`, which gives figures by the names of their files."""

from report.plots import (
    ablation,
    backward,
    beyond,
    format_build,
    formats,
    gather_model,
    heads,
    hero,
    models,
    paper,
    scaling,
    sm_activity,
    softmax_stability,
    speedups,
    training,
    waterfall,
)

__all__ = [
    "ablation",
    "backward",
    "beyond",
    "format_build",
    "formats",
    "gather_model",
    "heads",
    "hero",
    "models",
    "paper",
    "scaling",
    "sm_activity",
    "softmax_stability",
    "speedups",
    "training",
    "waterfall",
]
