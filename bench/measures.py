"""All benchmarks by name, which is also the stem of the CSV of their rows."""

from bench import (
    backward,
    doors,
    format_build,
    kernels,
    layers,
    models,
    parallel,
    peak_rates,
    sm_activity,
    softmax_stability,
)
from bench.runner import Measure

_KERNELS = Measure(kernels.cases, kernels.measure)
MEASURES = {
    "kernels": _KERNELS,
    "codes": _KERNELS,
    "heads": _KERNELS,
    "edges": _KERNELS,
    "backward": Measure(backward.cases, backward.measure),
    "sm_active": Measure(sm_activity.cases, sm_activity.measure),
    "end_to_end": Measure(models.cases, models.measure, features=True, finds_disturbed=True),
    "layers": Measure(layers.cases, layers.measure, begin=layers.begin),
    "doors": Measure(doors.cases, doors.measure, device="any"),
    "preprocessing": Measure(format_build.cases, format_build.measure, finished=("unchecked",)),
    "parallel": Measure(parallel.cases, parallel.measure, device="any"),
    "peak_rates": Measure(peak_rates.cases, peak_rates.measure, finished=("ok",)),
    # A softmax that loses rows is a result, and is not measured again.
    "stability": Measure(
        softmax_stability.cases,
        softmax_stability.measure,
        begin=softmax_stability.begin,
        device="any",
        finished=("ok", "wrong", "error"),
    ),
}
