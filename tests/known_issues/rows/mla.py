"""Faults of multi-head latent attention where TransformerEngine is absent."""

from __future__ import annotations

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.known_issues.rows.row import KnownIssue, Place

_MODULE = "transformer/multi_latent_attention.py"
_HERE = ("mtrain/core/layers/attention/mla.py",)
_TESTS = "tests/known_issues/test_mla.py::test_"
_OURS = f"{_TESTS}ours_is_the_plain_module_on_one_rank"


def _has_latents(config: Config, layout: Layout) -> bool:
    return config.model.mla is not None


def _latents_are_copied(config: Config, layout: Layout) -> bool:
    return config.model.mla is not None and layout.tp > 1


ROWS = (
    KnownIssue(
        "latent attention believes in TransformerEngine",
        "It takes an import that yields None for a TransformerEngine that is there, and then compares with None as a "
        "class: a TypeError.",
        (
            Place(_MODULE, "", "TEColumnParallelLinear, TELinear, Linear, set_save_original_input = None"),
            Place(_MODULE, "MultiLatentAttention.__init__", "and isinstance(self.linear_proj, TELinear)"),
        ),
        "multi-head latent attention without TransformerEngine",
        _has_latents,
        "fixed",
        "Latent attention is a module of ours, built on the parallel linears alone.",
        _HERE,
        (f"{_TESTS}it_believes_in_transformer_engine", _OURS),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "core attention of latent heads",
        "Latent attention tells its core the sizes of keys and values, which the core attention of the local layers "
        "does not take: a TypeError.",
        (
            Place(_MODULE, "MultiLatentAttention.__init__", "k_channels=self.q_head_dim,"),
            Place(
                "transformer/dot_product_attention.py",
                "DotProductAttention.__init__",
                "pg_collection: Optional[ProcessGroupCollection] = None,",
            ),
        ),
        "multi-head latent attention without TransformerEngine",
        _has_latents,
        "fixed",
        "Our core attention takes the sizes from the tensors.",
        (*_HERE, "mtrain/core/layers/attention/core_attention.py"),
        (f"{_TESTS}its_core_attention_does_not_take_the_sizes", _OURS),
    ),
    KnownIssue(
        "gradient of the shared rotary key",
        "The rotary key is gathered over tensor-parallel ranks by an operation whose backward takes each rank's own "
        "part, but every rank has the gradient of its own heads only: the rows that project to it miss the others'.",
        (
            Place(
                _MODULE,
                "MLASelfAttention.get_query_key_value_tensors",
                "kv_combined = gather_from_tensor_model_parallel_region(kv_combined)",
            ),
        ),
        "multi-head latent attention with tp > 1, without TransformerEngine",
        _latents_are_copied,
        "fixed",
        "The latent and the rotary key pass together through one collective that sums both gradients over tp.",
        _HERE,
        (
            f"{_TESTS}the_shared_rotary_key_misses_gradients_under_tp",
            _OURS,
            "tests/parity/models/test_latent_attention.py::test_rows_under_every_kind_of_layout",
        ),
    ),
    KnownIssue(
        "norms of latents taken for norms of heads",
        "With qk_layernorm the gradients of all parameters called q_layernorm are summed over tp, but the norm of a "
        "latent sees all heads on every rank: without sequence parallelism its gradient comes out tp times too large.",
        (
            Place(
                "distributed/finalize_model_grads.py",
                "_allreduce_non_tensor_model_parallel_grads",
                'config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)',
            ),
        ),
        "multi-head latent attention with tp > 1 and qk_layernorm",
        _latents_are_copied,
        "fixed",
        "The field stays off with latents (model.qk_norm is refused); they are always normalised.",
        (*_HERE, "mtrain/config/schema/model.py"),
        (f"{_TESTS}the_flag_of_normalised_queries_sums_their_gradient_twice", _OURS),
    ),
)
