"""Tests of the table of known issues: each row's fault is shown in plain Megatron-Core, and is absent here.

Where an upgrade fixes a fault, the test that shows it fails: then the row and its workaround can go.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.checkpoint.format.safe_metadata import read_metadata
from mtrain.config import known_issues
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.config.schema.rope import RopeSection
from mtrain.core.engine.loss_reduction import PairAccumulator
from mtrain.core.layers.attention.rotary import inverse_frequencies
from mtrain.core.layers.norm import Norm
from mtrain.core.loss.pair import LossPair
from tests.known_issues import ranks, state_ranks
from tests.known_issues.configs import assert_refused, megatron_core, small
from tests.pool import Pool

REPLICAS = Layout(dp=2)
"""Layout with replicas; without them the optimizer is not the distributed one."""


def plain_loss(per_token: bool, loss: Any, num_microbatches: int = 1, cp: int = 1) -> tuple[Tensor, list[Any]]:
    """Returns what their last stage differentiates, and the reports it keeps."""
    fields = TransformerConfig(
        num_layers=1,
        hidden_size=2,
        num_attention_heads=1,
        calculate_per_token_loss=per_token,
        use_cpu_initialization=True,
    )
    reports: list[Any] = []
    arguments = (None, torch.ones(2), loss, fields, None, False, num_microbatches, reports)
    result, _ = forward_step_calc_loss(*arguments, cp_group_size=cp, is_last_stage=True)
    return result, reports


def test_a_two_part_closure_is_scaled() -> None:
    """Shows their scaling; tests/parity/layouts/test_layouts.py shows ours, with cp > 1 and many microbatches."""
    two, _ = plain_loss(True, lambda output: (output.sum(), {}), num_microbatches=4, cp=2)
    three, _ = plain_loss(True, lambda output: (output.sum(), torch.tensor(0), {}), num_microbatches=4, cp=2)
    assert (two.item(), three.item()) == (1.0, 2.0)


def test_a_report_that_shares_memory_changes_and_our_sums_do_not() -> None:
    pairs = PairAccumulator([MAIN_TERM], torch.device("cpu"))

    def closure(output: Tensor) -> Any:
        loss = output.sum()
        pairs.add({MAIN_TERM: LossPair(loss, torch.tensor(4.0, dtype=torch.float64))})
        return loss, torch.tensor(4), {"loss": loss.detach()}

    _, reports = plain_loss(False, closure)
    assert reports[0]["loss"].item() == 0.5
    assert pairs.sums.tolist() == [[2.0, 4.0]]


def test_small_weights_are_divided_by_their_own_sum(pool: Pool) -> None:
    theirs, _ = plain_loss(False, lambda output: (output.sum() * 0.25, torch.tensor(0.5), {}))
    assert theirs.item() == 0.5, "a mean of 1 became 0.5"
    assert pool.run(ranks.divided_gradient, Layout(), small(), 0.25, 0.5) == [0.5]


def test_a_batch_that_weighs_less_than_one_is_divided_by_one(pool: Pool) -> None:
    assert pool.run(ranks.divided_by_finalisation, Layout(), small(), 0.5) == [(1.0, 2.0)]


def test_shards_of_a_sequence_are_divided_by_their_own_tokens() -> None:
    """Has one token with a loss, and a second shard of the sequence without any: half of the gradient is left after
    the average over ranks, which the next test shows. Ours with cp > 1: tests/parity/layouts/test_layouts.py."""
    shards = ([1.0, 0.0], [0.0, 0.0])
    losses = [plain_loss(False, shard_of(torch.tensor(mask)), cp=2)[0].item() for mask in shards]
    assert sum(losses) / 2 == 0.5


def shard_of(mask: Tensor) -> Any:
    """Makes a closure of a shard, whose tokens all have the loss 1."""
    return lambda output: ((output * mask).sum(), mask.sum(), {})


def test_token_counts_overflow_and_denominators_do_not(pool: Pool) -> None:
    fractions, many = [1.5, 0.25], [2**31, 7]
    assert "can't be cast" in pool.run(ranks.counted_tokens, Layout(), fractions, "float32")[0]
    assert pool.run(ranks.counted_tokens, Layout(), many, "int64") == [7 - 2**31]
    assert pool.run(ranks.pair_denominator, Layout(), [*fractions, *many]) == [2**31 + 8.75]


def test_a_batch_without_tokens_leaves_no_gradient(pool: Pool) -> None:
    assert pool.run(ranks.gradients_without_tokens, Layout(), small()) == [(1.0, 0.0)]


def test_gradients_are_averaged_over_ranks_and_summed_here(pool: Pool) -> None:
    layout = Layout(dp=2)
    averaged, in_collective, summed = (
        pool.run(ranks.reduced_gradient, layout, *options) for options in ((False, False), (False, True), (True, False))
    )
    assert (averaged, in_collective, summed) == ([1.5, 1.5], [1.5, 1.5], [3.0, 3.0])
    assert pool.run(ranks.gradient_factors, layout, small()) == [{1.0}, {1.0}]


def test_gathered_logits_add_log_tp(pool: Pool) -> None:
    for gathered, split, ours in pool.run(ranks.gathered_logits, Layout(tp=2)):
        assert gathered - split == pytest.approx(math.log(2), rel=1e-5)
        assert ours == pytest.approx(split, rel=1e-6)


def test_sums_of_tensors_with_gaps_are_lost(pool: Pool) -> None:
    """Sums a contiguous gradient to 1 + 2 on both ranks; one with gaps stays each rank's own."""
    assert pool.run(ranks.summed_gradient, Layout(tp=2), True) == [[3.0] * 6, [3.0] * 6]
    assert pool.run(ranks.summed_gradient, Layout(tp=2), False) == [[1.0] * 6, [2.0] * 6]


def test_the_fused_cross_entropy_rounds_to_bf16(pool: Pool) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((4, 3, 8)).astype(np.float32), rng.integers(0, 8, (4, 3))
    theirs, ours, exact = (
        torch.from_numpy(one) for one in pool.run(ranks.fused_cross_entropy, Layout(), logits, labels)[0]
    )
    assert torch.equal(theirs.bfloat16().float(), theirs)
    assert (theirs - exact).abs().max() > 1e-4
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)


def test_padding_of_the_vocabulary_changes_the_loss(pool: Pool) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((4, 3, 8)).astype(np.float32), rng.integers(0, 5, (4, 3))
    theirs, ours, exact = pool.run(ranks.padded_vocabulary, Layout(), logits, labels, 5)[0]
    assert theirs > exact + 0.1
    assert ours == pytest.approx(exact, rel=1e-6)


def test_initial_weights_depend_on_tp_on_a_gpu(pool: Pool) -> None:
    (whole,) = pool.run(ranks.drawn_on_a_gpu, Layout())
    halves = np.concatenate(pool.run(ranks.drawn_on_a_gpu, Layout(tp=2)))
    assert np.abs(whole - halves).max() > 0.01


def test_initial_weights_depend_on_no_layout_here(pool: Pool) -> None:
    given = small(model__vocab_size=101)
    one = pool.run(ranks.drawn_here, Layout(), given)[0]
    for layout in (Layout(tp=2), Layout(pp=2)):
        other = pool.run(ranks.drawn_here, layout, given)[0]
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_array_equal(other[name][: len(values)], values, err_msg=name)
            assert not other[name][len(values) :].any(), "rows of the padded vocabulary"


def test_freed_outputs_arrive_as_other_numbers(pool: Pool) -> None:
    """Shows what the race does that test_whole_steps.py finds in the interleaved schedule of 0.16.1."""
    freed, kept = (
        pool.run(ranks.sent_and_freed, Layout(pp=2), deallocates, 100_000)[1] for deallocates in (True, False)
    )
    assert freed != 1.0
    assert kept == 1.0


def test_norms_are_marked_for_sequence_parallelism() -> None:
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
    }
    plain = TransformerConfig(**fields)
    split = TransformerConfig(**fields, tensor_model_parallel_size=2, sequence_parallel=True)
    assert not hasattr(WrappedTorchNorm(plain, 8).weight, "sequence_parallel")
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(split, 8)
    assert all(parameter.sequence_parallel for parameter in Norm(split, 8).parameters())  # type: ignore[attr-defined]


def test_attention_keeps_documents_apart_where_theirs_refuses(pool: Pool) -> None:
    packed, parallel = pool.run(ranks.refusals_of_dot_product_attention, Layout())[0]
    assert "Packed sequence is not supported" in packed
    assert "Context parallelism is only supported" in parallel
    assert pool.run(ranks.attention_over_documents, Layout())[0] < 1e-6


def test_llama3_scaling_reads_its_constants() -> None:
    rope = RopeSection(base=10000, scaling="llama3", factor=4, original_max_positions=2048)
    theirs = RotaryEmbedding(64, 1.0, rope_scaling=True, rope_scaling_factor=4, use_cpu_initialization=True).inv_freq
    ours, _ = inverse_frequencies(rope, 64)
    fixed, _ = inverse_frequencies(rope.model_copy(update={"original_max_positions": 8192}), 64)
    torch.testing.assert_close(theirs, fixed)
    assert (ours / theirs - 1).abs().max() > 0.1


def test_recomputed_norms_need_transformer_engine(pool: Pool) -> None:
    assert "is not defined" in pool.run(ranks.recomputed_without_output, Layout())[0]
    assert pool.run(ranks.recomputed_modules, Layout(), small(train__recompute="selective")) == [["core_attn"]]


def test_shared_out_activations_mix_replicas(pool: Pool) -> None:
    found = pool.run(ranks.shared_out_activation, Layout(tp=2, dp=2))
    assert found == [[2.0, 2.0, 4.0, 4.0]] * 4, "2 at the first replica and 4 at the second would be right"
    assert_refused({"distribute_saved_activations": True})


def test_attention_sinks_miss_in_the_norm(pool: Pool) -> None:
    assert pool.run(ranks.sinks_are_marked, Layout(tp=2)) == [(True, True), (False, True)]


def test_float32_residuals_do_not_fit_the_next_stage(pool: Pool) -> None:
    assert pool.run(ranks.residual_types, Layout()) == [("torch.float32", "torch.bfloat16")]
    assert_refused({"fp32_residual_connection": True})


def test_fields_that_nothing_reads_are_refused() -> None:
    sources = {path: path.read_text() for path in megatron_core().rglob("*.py")}
    declaring = {"transformer_config.py"}
    readers = [path for path, text in sources.items() if "apply_residual_connection_post_layernorm" in text]
    assert {path.name for path in readers} == declaring
    called = [path for path, text in sources.items() if re.search(r"(?<!def )(?<!\.)\bclip_qk\(model", text)]
    assert called == []
    assert_refused({"apply_residual_connection_post_layernorm": True})
    assert_refused({"qk_clip": True})


def test_fields_of_replaced_layers_are_refused() -> None:
    """Checks that only layers which are replaced here read these fields."""
    replaced = {
        "apply_query_key_layer_scaling": "dot_product_attention.py",
        "qk_l2_norm": "gpt_layer_specs.py",
    }
    for field, name in replaced.items():
        (path,) = [path for path in megatron_core().rglob(name) if "inference" not in path.parts]
        assert field in path.read_text()
        assert_refused({field: True})


def test_fp8_is_passed_over_without_transformer_engine() -> None:
    assert importlib.util.find_spec("transformer_engine") is None, "these tests run without TransformerEngine"
    fields = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, fp8="hybrid", use_cpu_initialization=True
    )
    assert isinstance(get_fp8_context(fields), nullcontext)
    assert_refused({"fp8": "hybrid"})


def test_dropout_depends_on_the_layout_and_is_noted(pool: Pool) -> None:
    dropping = small(model__hidden_dropout=0.5)
    losses = [pool.run(state_ranks.first_loss, layout, dropping)[-1] for layout in (Layout(), Layout(tp=2, sp=True))]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert known_issues.notes(dropping) == [known_issues.DROPOUT.text]


def test_the_norm_is_reported_without_clipping(pool: Pool) -> None:
    theirs, ours = pool.run(state_ranks.norms_without_clipping, REPLICAS, small(optimizer__clip_grad=0))[0]
    assert theirs == 0.0
    clipping = pool.run(state_ranks.norms_without_clipping, REPLICAS, small(optimizer__clip_grad=1e3))[0]
    assert ours == clipping[1] > 0.1


def test_the_epsilon_in_clipping_is_noted() -> None:
    gradient = torch.nn.Parameter(torch.zeros(1))
    gradient.grad = torch.tensor([2e-6])
    clip_grad_by_total_norm_fp32([gradient], max_norm=1e-6, total_norm=2e-6)
    assert gradient.grad.item() == pytest.approx(2 / 3 * 1e-6), "a third below the limit"
    assert known_issues.notes(small(optimizer__clip_grad=1e-6)) == [known_issues.CLIPPING.text]


def test_adam_counts_updates_once_after_a_load(pool: Pool) -> None:
    steps = pool.run(state_ranks.adam_steps, REPLICAS, small())[0]
    assert min(steps["theirs"]) > 5, "once for each parameter that this rank updates"
    assert steps["ours"] == {2}


def test_states_are_loaded_before_the_first_update(pool: Pool) -> None:
    assert pool.run(state_ranks.states_before_the_first_update, REPLICAS, small()) == [(False, 7)] * 2


def test_loading_does_not_ask_for_adams_step(pool: Pool) -> None:
    """Shows their loading; every resumed run of tests/core/state/test_save_and_load.py shows ours."""
    assert pool.run(state_ranks.set_one_state, REPLICAS, small()) == ["'step'"] * 2


def test_states_after_padding_are_their_own(pool: Pool) -> None:
    tied = small(model__tied_embeddings=True)
    for theirs, ours in pool.run(state_ranks.shifted_states, Layout(pp=2, dp=2), tied):
        assert theirs > 0
        assert ours == 0


def test_the_default_checkpoint_form_cannot_be_saved(pool: Pool) -> None:
    assert "flattened_range is not supported" in pool.run(state_ranks.save_without_metadata, REPLICAS, small())[0]


def test_a_save_of_theirs_starts_processes(pool: Pool, tmp_path: Path) -> None:
    """Ends at once, as ranks of the pool may start no processes."""
    assert "not allowed to have children" in pool.run(state_ranks.save_by_megatron, Layout(), tmp_path)[0]


def test_their_writer_needs_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "HAVE_PSUTIL", False)
    with pytest.raises(RuntimeError, match="psutil is not installed"):
        filesystem_async._process_memory()


class MakesAFile:
    """Object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_code_in_their_reader_and_not_in_ours(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(MakesAFile(mark)))
    with pytest.raises(DataError, match="is not allowed"):
        read_metadata(tmp_path)
    assert not mark.exists()
    with pytest.raises(AttributeError):  # what it read is no list of tensors
        _get_filesystem_reader(str(tmp_path)).read_metadata()
    assert mark.exists()
