"""Translates our configuration to megatron-core's TransformerConfig."""

from collections.abc import Mapping
from typing import Any, assert_never

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.layout import CpComm
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import Precision, TrainSection
from mtrain.core.layers.layer_parts import transformer_fields

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF_PRECISION: Mapping[Precision, dict[str, bool]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
"""Flags in the configurations of model and optimizer; without them megatron-core computes in fp32."""

SMALLEST_LOSS_SCALE = 1.0
"""Smallest fp16 loss scale; the numerator_scale (`mtrain/core/engine/finalize.py`) keeps gradients near 1."""


def gelu_tanh(hidden: Tensor) -> Tensor:
    """Computes GELU in its tanh approximation."""
    return functional.gelu(hidden, approximate="tanh")


def relu2(hidden: Tensor) -> Tensor:
    """Computes relu(x)^2."""
    return functional.relu(hidden).square()


def as_it_is(weight: Tensor) -> Tensor:
    """Returns the weight unchanged; serves as initializer for weights that are drawn later."""
    return weight


_ACTIVATIONS = {
    "swiglu": functional.silu,
    "swiglu_clamped": quick_gelu,
    "geglu_tanh": gelu_tanh,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}
CP_COMM_TYPES: Mapping[CpComm, str] = {"allgather": "all_gather", "ulysses": "a2a", "ring": "p2p"}
_NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_CLAMPED = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
"""Fields for GPT-OSS: the bound of both projections, and the number added to the one without activation."""


def transformer_config(config: Config, layout: Layout, device: torch.device) -> TransformerConfig:
    """Builds the TransformerConfig of this model under this layout.

    Raises:
        ConfigError: megatron-core refuses a combination, for example of fields in `model.megatron`.
    """
    fields = {
        **_architecture(config.model),
        **transformer_fields(config.model),
        **_parallelism(config.model, layout),
        **_execution(config.train, device),
        **_in_8_bits(config),
        **_passed_through(config.model.megatron, layout),  # last, so that they override all others
    }
    try:
        return TransformerConfig(**fields)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"megatron-core refuses the model configuration: {error}") from error


def compute_in_float64(translated: TransformerConfig) -> None:
    """Changes a configuration for float32 so that modules built with it compute in float64."""
    translated.params_dtype = translated.pipeline_dtype = torch.float64
    translated.gradient_accumulation_fusion = False  # fused products only add to float32


def _passed_through(fields: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns the fields of `model.megatron` without those for transfers that `layout` does not make, since a reference
    of one process, a teacher or a generator may have another layout than the run."""
    overlaps = layout.vpp > 1 and fields.get("overlap_p2p_comm") is not False
    unfit = {
        "overlap_p2p_comm": layout.vpp == 1,
        "overlap_p2p_comm_warmup_flush": not overlaps,
        "batch_p2p_comm": overlaps or (layout.vpp > 1 and layout.pp == 2),
    }
    return {name: value for name, value in fields.items() if not unfit.get(name, False)}


def _architecture(model: ModelSection) -> dict[str, Any]:
    # megatron-core counts the keys before the query's own, we include it
    window = None if model.sliding_window is None else (model.sliding_window - 1, 0)
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_size,
        "normalization": _NORMALIZATIONS[model.norm],
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.zero_centered_norm,
        "gated_linear_unit": model.is_gated,
        "activation_func": _ACTIVATIONS[model.activation],
        **(_CLAMPED if model.activation == "swiglu_clamped" else {}),
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias or model.linear_bias,
        "window_size": window,
        "window_attn_skip_freq": model.global_attention_every,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_std,
        "mtp_num_layers": len(model.layers_ahead) or None,
    }


def _parallelism(model: ModelSection, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": _stage_contents(model, layout),
        "context_parallel_size": layout.cp,
        "cp_comm_type": CP_COMM_TYPES[layout.cp_comm],
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # With interleaving, a stage exchanges with its next and its previous stage at once. At pp = 2 both are the same
        # rank, and batched transfers would mix up activations and gradients (p2p_communication.py::_batched_p2p_ops).
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # would wait for the whole GPU after each transfer, because of a bug in torch before 1.13
        "batch_p2p_sync": False,
    }


def _stage_contents(model: ModelSection, layout: Layout) -> list[list[str]] | None:
    """Returns the contents of each (virtual) stage, in model order; None if the layers divide evenly."""
    layers = layout.layers_per_stage(model.num_layers)
    if len(set(layers)) == 1:
        return None
    contents = [["decoder"] * count for count in layers]
    contents[0].insert(0, "embedding")
    contents[-1] += ["mtp" for _ in model.layers_ahead] + ["loss"]
    return contents


def _execution(train: TrainSection, device: torch.device) -> dict[str, Any]:
    dtype = DTYPES[train.precision]
    on_cpu = device.type == "cpu"
    return {
        **HALF_PRECISION[train.precision],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,  # dtype of transfers between stages; both ends must agree
        "use_cpu_initialization": on_cpu,
        # init_weights.py draws the weights. perform_initialization stays on, since without it megatron-core does not
        # mark weights as tensor-parallel, and the gradient norm would miss those of tp rank > 0.
        "init_method": as_it_is,
        "output_layer_init_method": as_it_is,
        "embedding_init_method": as_it_is,
        "deterministic_mode": train.deterministic,
        "calculate_per_token_loss": True,  # gradients are sums; mtrain.core.engine.finalize divides them once
        # gloo may still be sending an output when it is freed; on a GPU the stream keeps the order
        "deallocate_pipeline_outputs": not on_cpu,
        **_recomputed(train),
    }


def _in_8_bits(config: Sections) -> dict[str, str]:
    """Returns fields for TransformerEngine's 8-bit products alone: parameters, attention and communication stay in
    bfloat16."""
    fp8 = config.train.fp8
    return {} if fp8 is None or config.has_own_fp8 else {"fp8": fp8, "fp8_recipe": config.fp8_recipe}


def _recomputed(train: TrainSection) -> dict[str, Any]:
    match train.recompute:
        case "none":
            return {}
        case "selective":
            modules = ("core_attn",) if train.recompute_modules is None else train.recompute_modules
            return {"recompute_granularity": "selective", "recompute_modules": list(modules)}
        case "full" if train.recompute_layers is None:
            # not "block", which passes no padding mask to layers that are not recomputed
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case "full":
            layers = train.recompute_layers
            return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
        case _ as never:
            assert_never(never)
