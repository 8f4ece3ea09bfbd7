"""Faults of layers of experts."""

from __future__ import annotations

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.known_issues.rows.row import KnownIssue, Place

_LINEARS = "tensor_parallel/layers.py"
_UTILITIES = "transformer/moe/moe_utils.py"
_EXPERTS = "mtrain/core/layers/moe/experts.py"
_ROUTER = "mtrain/core/layers/moe/router.py"
_TESTS = "tests/known_issues/test_experts.py::test_"
_PARITY = "tests/parity/models/test_experts.py::test_experts_do_not_change_with_the_layout"


def _has_experts(config: Config, layout: Layout) -> bool:
    return config.model.experts is not None


def _is_tensor_parallel(config: Config, layout: Layout) -> bool:
    return config.model.experts is not None and layout.tp > 1


def _is_apart(config: Config, layout: Layout) -> bool:
    """Says whether experts have other replicas than dense layers, without anything by which megatron-core marks
    them."""
    return config.model.experts is not None and layout.ep == 1 and layout.etp != layout.tp


def _has_two_scales(config: Config, layout: Layout) -> bool:
    return config.model.experts is not None and config.train.precision == "fp16"


ROWS = (
    KnownIssue(
        "experts without TransformerEngine",
        "The router asks for a function of TransformerEngine that was never imported: a NameError.",
        (
            Place(
                _UTILITIES,
                "RouterGatingLinearFunction.forward",
                "if te_general_gemm is not None and router_dtype != torch.float64:",
            ),
            Place(
                _UTILITIES,
                "RouterGatingLinearFunction.backward",
                "if te_general_gemm is not None and ctx.router_dtype != torch.float64:",
            ),
        ),
        "experts without TransformerEngine",
        _has_experts,
        "fixed",
        "The router is our own.",
        (_ROUTER,),
        (f"{_TESTS}their_router_needs_transformer_engine",),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "scores of experts in float32",
        "Scores are rounded to float32 whatever precision the router was asked for, float64 too.",
        (
            Place(
                _UTILITIES,
                "topk_routing_with_score_function",
                "scores = torch.softmax(logits, dim=-1, dtype=torch.float32)",
            ),
        ),
        "experts in a float64 model, as references are",
        _has_experts,
        "fixed",
        "Scores are float32, and float64 in a float64 model.",
        (_ROUTER,),
        (f"{_TESTS}their_scores_are_float32_in_a_float64_model",),
    ),
    KnownIssue(
        "gradients of experts that are not summed over tp",
        "Experts are distinguished from dense parameters by ep > 1 alone: with ep = 1 and etp < tp each rank of tp "
        "has whole experts and a part of the tokens, but their gradients are not summed, and replicas part.",
        (
            Place(
                _LINEARS,
                "ColumnParallelLinear.__init__",
                'setattr(self.weight, "allreduce", not (self.is_expert and self.expert_parallel))',
            ),
            Place(
                _LINEARS,
                "RowParallelLinear.__init__",
                'setattr(self.weight, "allreduce", not (self.is_expert and self.expert_parallel))',
            ),
        ),
        "experts with ep = 1 and etp != tp",
        _is_apart,
        "fixed",
        "All experts are marked as such, whatever ep is.",
        (_EXPERTS,),
        (f"{_TESTS}gradients_of_experts_miss_their_sum_over_tp", _PARITY),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "biases of several experts added up",
        "The second bias of an expert is marked for sequence parallelism, so its gradient is summed over tp, where ep "
        "has put other experts.",
        (
            Place(
                _LINEARS,
                "RowParallelLinear.__init__",
                'setattr(self.bias, "sequence_parallel", self.sequence_parallel)',
            ),
        ),
        "experts with biases, tp > 1 and ep > 1",
        lambda config, layout: _is_tensor_parallel(config, layout) and config.model.linear_bias,
        "fixed",
        "Biases of experts are marked as their weights are.",
        (_EXPERTS,),
        (f"{_TESTS}gradients_of_biases_of_several_experts_are_added", _PARITY),
    ),
    KnownIssue(
        "experts in the gradient norm",
        "A parameter without the mark of tensor parallelism counts on tensor-parallel rank 0 alone; experts that are "
        "not initialised, or TransformerEngine's with etp = 1, have none, and those of other ranks are left out.",
        (
            Place(
                _LINEARS,
                "param_is_not_tensor_parallel_duplicate",
                "def param_is_not_tensor_parallel_duplicate(param, tp_group=None):",
            ),
        ),
        "experts with tp > 1",
        _is_tensor_parallel,
        "fixed",
        "Every expert's parameters carry the mark, and each counts once.",
        (_EXPERTS, "mtrain/core/engine/optimizer.py"),
        (f"{_TESTS}experts_miss_in_the_norm", _PARITY),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "two loss scales",
        "Dense parameters and experts have an optimizer and a loss scale each; when gradients of one overflow, its "
        "scale alone falls, while the loss is multiplied by the other's.",
        (Place("optimizer/optimizer.py", "ChainedOptimizer.prepare_grads", "found_inf_flag = False"),),
        "experts in fp16",
        _has_two_scales,
        "fixed",
        "One norm of all gradients says whether one overflowed, and the scales move together.",
        ("mtrain/core/engine/optimizer.py",),
        (f"{_TESTS}loss_scales_part_when_experts_overflow",),
    ),
    KnownIssue(
        "split sizes on CPUs",
        "Split sizes of the all-to-all become numbers on a GPU only; on a CPU they stay a tensor: a TypeError.",
        (Place(_UTILITIES, "maybe_move_tensor_to_cpu", "if torch.is_tensor(tensor) and tensor.is_cuda:"),),
        "experts on CPUs, dispatched by all-to-all",
        _has_experts,
        "fixed",
        "They become numbers; gloo, which refuses lists of several sizes besides, sends those by all-to-all.",
        ("mtrain/core/ranks/cpu.py", "mtrain/core/ranks/cpu_collectives.py"),
        (f"{_TESTS}split_sizes_stay_tensors_on_cpus", f"{_TESTS}lists_of_several_sizes_travel_on_gloo", _PARITY),
    ),
    KnownIssue(
        "checkpoint keys of expert layers",
        "Layers without TransformerEngine write the norm before experts under the name that it has in dense layers, "
        "which TransformerEngine's layers of experts do not read.",
        (
            Place(
                "models/gpt/gpt_layer_specs.py",
                "get_gpt_layer_local_spec",
                '"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",',
                "0.16.1",
            ),
            Place(
                "models/gpt/gpt_layer_specs.py",
                "get_gpt_layer_local_submodules",
                '"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",',
                "0.19.2",
            ),
        ),
        "experts without TransformerEngine, saved",
        _has_experts,
        "fixed",
        "Names are those of TransformerEngine for each kind of layer.",
        ("mtrain/core/layers/layer_spec.py",),
        (
            f"{_TESTS}their_checkpoint_keys_of_expert_layers_are_dense_ones",
            "tests/core/state/test_expert_state.py::test_checkpoint_keys_are_megatrons",
        ),
    ),
)
