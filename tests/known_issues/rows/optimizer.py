"""Faults in the optimizer and its state."""

from __future__ import annotations

from mtrain.config import known_issues
from tests.known_issues.rows.row import KnownIssue, Place, issue_test

_OPTIMIZER = "optimizer/optimizer.py"
_DISTRIBUTED = "optimizer/distrib_optimizer.py"

ROWS = (
    KnownIssue(
        "norm without clipping",
        "With clip_grad = 0 a single optimizer reports a gradient norm of 0.0, or none.",
        (
            Place(_OPTIMIZER, "MixedPrecisionOptimizer.step", "grad_norm = 0.0"),
            Place(_OPTIMIZER, "FP32Optimizer.step", "grad_norm = None"),
        ),
        "optimizer.clip_grad=0",
        lambda config, layout: config.optimizer.clip_grad == 0,
        "fixed",
        "The norm is computed at every step, before anything is clipped.",
        ("mtrain/core/engine/optimizer.py",),
        (issue_test("the_norm_is_reported_without_clipping"),),
    ),
    KnownIssue(
        "epsilon in clipping",
        "Gradients are multiplied by clip_grad / (norm + 1e-6), as in torch: for a tiny limit that is far too little.",
        (
            Place(
                "optimizer/clip_grads.py",
                "clip_grad_by_total_norm_fp32",
                "clip_coeff = max_norm / (total_norm + 1.0e-6)",
            ),
        ),
        "optimizer.clip_grad below 0.001",
        lambda config, layout: known_issues.CLIPPING.applies(config),
        "noted",
        "Kept, since torch and transformers do the same; the log says so. It acts after the one division, so it does "
        "not depend on the layout.",
        ("mtrain/core/engine/optimizer.py", "mtrain/config/known_issues.py"),
        (issue_test("the_epsilon_in_clipping_is_noted"),),
    ),
    KnownIssue(
        "one step counter for all parameters",
        "After a load all parameters share one step tensor, which each of them advances: Adam's bias correction runs "
        "away.",
        (
            Place(
                _DISTRIBUTED,
                "DistributedOptimizer.load_state_dict",
                'steps = list(set([g["step"] for g in state_dict["optimizer"]["param_groups"]]))',
            ),
        ),
        "the distributed optimizer with torch's Adam, resumed",
        lambda config, layout: config.train.distributed_optimizer,
        "fixed",
        "Each parameter gets a counter of its own.",
        ("mtrain/core/engine/optimizer_state.py",),
        (issue_test("adam_counts_updates_once_after_a_load"),),
    ),
    KnownIssue(
        "loading before the first update",
        "An optimizer that has not stepped cannot tell its state, which loading starts with.",
        (Place(_DISTRIBUTED, "DistributedOptimizer.state_dict", "assert len(steps) == 1"),),
        "the distributed optimizer with torch's Adam, resumed",
        lambda config, layout: config.train.distributed_optimizer,
        "fixed",
        "States are made where they are missing.",
        ("mtrain/core/engine/optimizer_state.py",),
        (issue_test("states_are_loaded_before_the_first_update"),),
    ),
    KnownIssue(
        "loading visits Adam's step",
        "Loading copies every state that Adam holds, its step too, which was not saved: a KeyError, or a stale value.",
        (
            Place(
                _DISTRIBUTED,
                "DistributedOptimizer._set_main_param_and_optimizer_states",
                "dst_tensors[key].copy_(tensors[key])",
            ),
        ),
        "the distributed optimizer with torch's Adam, resumed",
        lambda config, layout: config.train.distributed_optimizer,
        "fixed",
        "Main weights and moments are set by name, the step from its own counter.",
        ("mtrain/core/engine/optimizer_state.py",),
        (issue_test("loading_does_not_ask_for_adams_step"),),
    ),
    KnownIssue(
        "states shifted by padding",
        "The form that fits every layout takes buckets together without their padding, but looks parameters up in the "
        "padded buffer: states after the first padding are those of other parameters.",
        (
            Place(
                _DISTRIBUTED,
                "DistributedOptimizer.get_parameter_state_dp_zero",
                "end = offset_in_world_tensors + gbuf_world_numel_unpadded",
            ),
            Place(
                _DISTRIBUTED,
                "DistributedOptimizer.sharded_param_state_fully_reshardable",
                "state_ten = world_tensors[state_key][param_world_start:param_world_end]",
            ),
        ),
        "the distributed optimizer with more than one gradient bucket, saved",
        lambda config, layout: config.train.distributed_optimizer,
        "fixed",
        "States are gathered bucket by bucket, each parameter from its place in its bucket.",
        ("mtrain/core/engine/optimizer_state.py",),
        (issue_test("states_after_padding_are_their_own"),),
    ),
)
