"""Known faults of adapters; `mtrain.verify.planted.inject` says what a fault is and lists them all."""

from __future__ import annotations

from mtrain.config import Config
from mtrain.verify.planted.fault import Fault


def _adapts(config: Config) -> bool:
    return config.adapter is not None


def _is_scaled(config: Config) -> bool:
    return config.adapter is not None and config.adapter.scale != 1


def _has_row_parallel_magnitudes(config: Config) -> bool:
    return config.adapter is not None and config.adapter.has_magnitudes and bool(config.adapter.parts & {"proj", "fc2"})


ADAPTER_FAULTS = (
    Fault(
        "adapter-gradient-times-tp",
        "sums the gradient behind a replicated A tp times over the tensor-parallel ranks",
        "tp",
        _adapts,
        "adapter",
    ),
    Fault(
        "adapter-gradient-not-reduced",
        "does not sum gradients of an adapter's replicated matrices over the sequence-parallel ranks",
        "sp",
        _adapts,
        "adapter",
    ),
    Fault(
        "adapter-scale-dropped",
        "leaves alpha / rank out",
        None,
        _is_scaled,
        "adapter with alpha / rank (rslora: alpha / sqrt(rank)) other than 1",
    ),
    Fault(
        "magnitude-by-tp-rank",
        "takes the norms of rows over the columns that one tensor-parallel rank holds",
        "tp",
        _has_row_parallel_magnitudes,
        "adapter.kind=dora with proj or fc2 among its targets",
    ),
    Fault("frozen-weights-decayed", "lets weight decay shrink the frozen model", None, _adapts, "adapter"),
)
