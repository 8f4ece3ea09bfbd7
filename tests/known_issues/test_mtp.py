"""Faults of multi-token prediction in plain Megatron-Core.

The tests that `tests/known_issues/rows/mtp.py` names besides these show that they are absent here."""

from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, roll_tensor
from megatron.core.transformer.utils import is_layer_window_attention

from mtrain.arch.layout import Layout
from mtrain.core.batch.collate import values_ahead
from mtrain.core.ranks.groups import Groups
from tests.known_issues.plain import PlainStep, plain_step
from tests.known_issues.ranks import SEQ, fields
from tests.known_issues.test_whole_steps import OF_THEIRS, WHOLE_TABLE
from tests.parity.batches import GlobalBatch, empty_batch, three_steps
from tests.parity.cases import case
from tests.parity.compare import initial_parameters, run_oracle, tensor_deviation
from tests.pool import Pool
from tests.reference import StepResult

CHANGES = {**WHOLE_TABLE, "model__mtp_depths": 1}
DEPTH = "mtp.layers.0.eh_proj.weight"
"""Name of a parameter that only the loss of the depth reaches."""


def step_with_depth(
    groups: Groups, model: Any, parameters: Any, batch: GlobalBatch, size: int, options: dict[str, Any]
) -> PlainStep:
    """Runs `plain_step` without keywords, which `Pool.run` does not pass."""
    return plain_step(groups, model, parameters, batch, size, mtp_num_layers=1, **options)


def run(pool: Pool, batch: GlobalBatch, size: int = 4, **options: Any) -> PlainStep:
    config = case(size).config(**CHANGES)
    step: PlainStep
    (step,) = pool.run(step_with_depth, Layout(), config.model, initial_parameters(config), batch, size, {**options})
    return step


def exact(batch: GlobalBatch) -> StepResult:
    return run_oracle(case(4).config(**CHANGES), [batch])[0]


@OF_THEIRS
def test_depths_are_divided_by_the_tokens_of_the_main_loss(pool: Pool) -> None:
    batch = three_steps()[0]
    oracle, theirs = exact(batch), run(pool, batch, calculate_per_token_loss=True).gradients[DEPTH]
    counts = oracle.denominators
    assert counts["mtp_1"] < counts["main"]
    right = oracle.gradients[DEPTH].numpy()
    assert tensor_deviation(theirs, right) > 0.01
    assert tensor_deviation(theirs * (counts["main"] / counts["mtp_1"]), right) < 1e-5


def test_tokens_of_depths_weigh_according_to_their_microbatch(pool: Pool) -> None:
    """Shows that the gradient follows the size of a microbatch, and that it is exact where there is but one."""
    batch = three_steps()[0]
    right = exact(batch).gradients[DEPTH].numpy()
    whole, parts = (run(pool, batch, size, calculate_per_token_loss=True).gradients[DEPTH] for size in (len(batch), 1))
    assert tensor_deviation(whole, right) < 1e-5
    assert tensor_deviation(parts, right) > 0.01


def logged_after(groups: Groups, model: Any, parameters: Any, batch: GlobalBatch, size: int) -> float:
    """Returns what the log gets of the depth after a step."""
    MTPLossLoggingHelper.tracker.clear()
    step_with_depth(groups, model, parameters, batch, size, {"calculate_per_token_loss": True})
    tracker = MTPLossLoggingHelper.tracker
    values = tracker["values"] if "values" in tracker else tracker["loss_values"]  # its name in 0.16.1, and in 0.19.2
    return float(values[0])


def test_the_logged_loss_of_a_depth_is_a_mean_of_means(pool: Pool) -> None:
    """Divides by the number of microbatches, as megatron-core's own training loop does."""
    batch, config = three_steps()[0], case(4).config(**CHANGES)
    right = exact(batch).means["mtp_1"]
    sizes, parameters = (len(batch), 4), initial_parameters(config)
    whole, parts = (pool.run(logged_after, Layout(), config.model, parameters, batch, size)[0] for size in sizes)
    assert abs(whole / right - 1) < 1e-5
    assert abs(parts / (len(batch) // 4) / right - 1) > 1e-3


@OF_THEIRS
def test_a_microbatch_without_loss_tokens_is_not_a_number(pool: Pool) -> None:
    batch = three_steps()[0]
    (without, *_), (first, *_) = ([each for each in batch if each.mask.any() == any_] for any_ in (False, True))
    assert np.isnan(run(pool, [first, without], size=1).gradients[DEPTH]).any()
    assert np.isfinite(run(pool, [first] * 2, size=1).gradients[DEPTH]).all()


@OF_THEIRS
def test_without_a_mask_prompts_are_in_the_loss(pool: Pool) -> None:
    for passes_mask in (True, False):
        options: dict[str, Any] = {"calculate_per_token_loss": True, "passes_mask": passes_mask}
        assert run(pool, empty_batch(), **options).gradients[DEPTH].any() != passes_mask


def rolled(tokens: list[int], packed: PackedSeqParams | None) -> list[int]:
    found: list[int] = roll_tensor(torch.tensor([tokens]), packed_seq_params=packed)[0][0].tolist()
    return found


def test_rolling_takes_tokens_of_other_places() -> None:
    lengths, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_q_padded=padded)
    tokens = [11, 12, 13, 0, 21, 22, 0, 0]
    starts = np.array([0, 0, 0, 0, 4, 4, 4, 4], np.int32)
    assert rolled(tokens, packed) == [12, 13, 0, 21, 0, 22, 0, 0], "21 is followed by nothing, padding by 21"
    assert rolled(tokens, None)[3] == 21, "over the edge"
    assert values_ahead(np.array(tokens), starts, 1).tolist() == [12, 13, 0, 0, 22, 0, 0, 0]


def depths_of(groups: Groups, **changes: Any) -> GPTModel:
    """Builds a model of 2 layers with 2 depths."""
    config = TransformerConfig(**fields(groups, mtp_num_layers=2, **changes))
    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config,
        layers,
        vocab_size=8,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False),
        pg_collection=groups.collection,
    )


def numbers_in_depths(groups: Groups) -> list[int]:
    """Lists the numbers of the layers in two depths."""
    return [layer.mtp_model_layer.layer_number for layer in depths_of(groups).mtp.layers]  # not so called in 0.16.1


def test_layers_of_depths_are_numbered_as_the_first_ones(pool: Pool) -> None:
    """Has every third layer without a window: of the layers 3 and 4 the first, and of 1 and 2 none."""
    numbers = pool.run(numbers_in_depths, Layout())[0]
    assert numbers == [1, 2]
    windows = [[is_layer_window_attention((4, 0), 3, number) for number in which] for which in (numbers, [3, 4])]
    assert windows == [[True, True], [False, True]]


def norm_of_depths(groups: Groups, is_detached: bool) -> tuple[float, float]:
    """Returns the square of the norm of gradients of 1, and the number of parameters."""
    model = depths_of(groups, mtp_detach_heads=is_detached)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), 0.1), OptimizerConfig(lr=0.1), lambda _: None)
    optimizer.tp_group, optimizer.grad_stats_parallel_group = groups.tp, groups.tp
    return float(optimizer.get_grad_norm()) ** 2, float(sum(each.numel() for each in model.parameters()))


def test_detached_depths_are_missing_in_the_norm(pool: Pool) -> None:
    counted, present = pool.run(norm_of_depths, Layout(), False)[0]
    assert abs(counted / present - 1) < 1e-5
    counted, present = pool.run(norm_of_depths, Layout(), True)[0]
    assert counted < 0.8 * present


def tied_stage(groups: Groups) -> tuple[bool, str]:
    """Says whether a stage of theirs has an output table, and what describing its parameters raises."""
    config, layers = (
        TransformerConfig(**fields(groups, mtp_num_layers=1)),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
    )
    is_last = groups.pp_rank == groups.layout.pp - 1
    model = GPTModel(
        config,
        layers,
        vocab_size=8,
        max_sequence_length=SEQ,
        pre_process=groups.pp_rank == 0,
        post_process=is_last,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if is_last else None,
        pg_collection=groups.collection,
    )
    has_table = "output_layer.weight" in dict(model.named_parameters())
    try:
        model.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
    except AssertionError as error:
        return has_table, str(error)
    return has_table, ""


def test_tied_embeddings_cannot_be_described(pool: Pool) -> None:
    first, last = pool.run(tied_stage, Layout(pp=2))
    assert first == (False, "")
    assert last[0]
    assert "odict_keys" in last[1] or "dict_keys" in last[1]
