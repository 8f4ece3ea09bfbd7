"""Description of a model without torch: its features, layout, parameters, FLOPs and memory."""

from mtrain.arch.adapters import num_adapter_parameters
from mtrain.arch.features.feature import Parameters
from mtrain.arch.flops import (
    Work,
    flops_of_step,
    flops_per_token,
    mfu,
    num_attended_pairs,
    peak_flops,
    run_flops_per_token,
)
from mtrain.arch.memory import MemoryEstimate, memory_per_rank
from mtrain.arch.parameters import (
    layer_parameters,
    matrices_on_rank,
    num_active_parameters,
    num_padded_parameters,
    num_parameters,
    num_trained_parameters,
    padded_vocab_size,
    parameters_on_rank,
)

__all__ = [
    "MemoryEstimate",
    "Parameters",
    "Work",
    "flops_of_step",
    "flops_per_token",
    "layer_parameters",
    "matrices_on_rank",
    "memory_per_rank",
    "mfu",
    "num_active_parameters",
    "num_adapter_parameters",
    "num_attended_pairs",
    "num_padded_parameters",
    "num_parameters",
    "num_trained_parameters",
    "padded_vocab_size",
    "parameters_on_rank",
    "peak_flops",
    "run_flops_per_token",
]
