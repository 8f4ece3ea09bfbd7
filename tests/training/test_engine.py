"""`Engine` in a user's own loop: its numbers match the oracle, one call for all, and `mtrain train`."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mtrain import DataError, Datum, read_weights
from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.base.tensor_slice import TensorSlice
from mtrain.config import Config
from mtrain.convert.merged import stacked_places
from mtrain.core.batch.sample import Sample
from mtrain.core.layers.layer_spec import global_name
from mtrain.data.loader import StepLoader
from mtrain.launch.local import free_port
from tests.fault_table import Notice
from tests.parity.batches import SEQ, cut, three_steps, weighted_steps
from tests.parity.cases import Case, case
from tests.parity.compare import relative, worst
from tests.pool import Pool
from tests.reference import Parameters, exact_steps, logits_of
from tests.training import engine_ranks
from tests.training.engine_ranks import Calls
from tests.training.one_process import train_fresh
from tests.training.test_trainer import numbers

LAYOUTS = [
    case(4, num_layers=1),
    case(4, num_layers=1, tp=2, sp=True),
    case(2, num_layers=2, pp=2),
    case(2, num_layers=1, dp=2),
    case(4, num_layers=1, cp=2),
    case(2, pp=2, vpp=2),
]


def datum_of(sample: Sample) -> Datum:
    """Returns the sequence that a row of a batch was made of."""
    ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
    return Datum(ids, [0.0, *sample.mask.tolist()], sample.weight)


def data_of(batches: list[list[Sample]]) -> list[list[Datum]]:
    return [[datum_of(sample) for sample in batch] for batch in batches]


def parameters_of(path: Path) -> Parameters:
    """Returns a checkpoint's weights by the oracle's names."""
    found = {}
    for key, values in read_weights(path).items():
        for place in stacked_places(key, TensorSlice.whole(values.shape)):
            found[global_name(key, place)] = torch.from_numpy(values[place])
    return found


@pytest.mark.parametrize(  # the day shows tp, sp and dp by packed samples, and pp by an interleaved pipeline
    "case",
    [each if each.layout.keys() & {"cp", "vpp"} else pytest.param(each, marks=pytest.mark.nightly) for each in LAYOUTS],
    ids=str,
)
def test_a_loop_of_three_calls_a_step_computes_what_the_oracle_does(pool: Pool, tmp_path: Path, case: Case) -> None:
    """The oracle starts from the engine's first weights and computes losses, norms, weights, log-probabilities."""
    batches, config = weighted_steps()[1:], case.config()
    given = (config, data_of(batches), 6, str(tmp_path))
    runs = pool.run(engine_ranks.train, case.resolved(config), *given)
    saved = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in (0, 2)]
    rates = [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(2)]
    exact = exact_steps(config, parameters_of(saved[0]), rates, batches)
    for run in runs:
        for done, wanted in zip(run.steps, exact, strict=True):
            assert relative(done.loss, wanted.loss) < 1e-5
            assert relative(done.grad_norm, wanted.grad_norm) < 1e-5
            assert done.denominator == pytest.approx(wanted.denominators["main"], rel=1e-12)
            assert done.tokens == len(batches[0]) * SEQ
            assert done.applied
    weights = {name: values.numpy() for name, values in parameters_of(saved[1]).items()}
    assert worst(weights, {name: value.numpy() for name, value in exact[-1].parameters.items()}, config) < 1e-5
    for found, entropy, sample in zip(runs[0].log_probs, runs[0].entropy, batches[-1], strict=True):
        logits = logits_of(exact[-1].parameters, config.model, torch.from_numpy(sample.tokens)[None])[0]
        ids = torch.tensor(datum_of(sample).input_ids[1:])
        likely = logits.log_softmax(-1)
        np.testing.assert_allclose(found, likely.gather(1, ids[:, None])[:, 0].detach().numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(entropy, -(likely.exp() * likely).sum(1).detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.nightly  # the day shows it by the test below, and a pipeline of three calls by the one above
@pytest.mark.parametrize(  # without replicas nothing is sent during the computation
    ("case", "overlap"), [(LAYOUTS[0], False), (LAYOUTS[2], False), (LAYOUTS[3], False), (LAYOUTS[3], True)], ids=str
)
def test_three_calls_are_one_to_the_bit(pool: Pool, case: Case, overlap: bool) -> None:
    config = case.config(train__overlap_grad_reduce=overlap, train__overlap_param_gather=overlap)
    batches = [batch[:12] for batch in data_of(three_steps())[:2]]
    runs = [pool.run(engine_ranks.train, case.resolved(config), config, batches, size) for size in (4, 12)]
    for three, one in zip(*runs, strict=True):
        assert three.steps == one.steps
        assert three.evaluation == one.evaluation
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(three.log_probs, one.log_probs, strict=True))


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (replace(LAYOUTS[3], layout={"dp": 2, "shard": "weights"}), "bf16"),
        pytest.param(LAYOUTS[3], "fp32", marks=pytest.mark.nightly),  # as adapters: tests/training/test_adapters.py
    ],
    ids=str,
)
def test_a_model_that_was_set_aside_in_a_step_goes_on_to_the_bit(pool: Pool, case: Case, precision: str) -> None:
    config, (*batches, other) = case.config(train__precision=precision), data_of(three_steps())
    for alone, in_turns in pool.run(engine_ranks.set_aside, case.resolved(config), config, batches, other):
        assert alone == in_turns
        assert alone[2].loss != alone[5].loss


def test_calls_of_parts_are_one_call_for_every_kind_of_sum(pool: Pool) -> None:
    """Results agree to the bit: one denominator for the step, gradients sent during the computation, means over
    sequences with another term, extras, biases of experts."""
    experts = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "score": "sigmoid"}
    experts |= {"expert_bias": True, "bias_update_rate": 0.1}
    beside = {"near": {"function": "kl", "coefficient": 0.1, "aggregation": "seq-mean-token-mean"}}
    small = case(2, num_layers=1, dp=2)
    cases = [
        Calls(small.config(loss__aggregation="sum", train__overlap_grad_reduce=True, train__overlap_param_gather=True)),
        Calls(
            small.config(loss__aggregation="seq-mean-token-mean", loss__side_terms=beside), "ppo", {"dual_clip": 3.0}
        ),
        Calls(small.config(model__experts=experts)),
    ]
    # three calls and then two: counting them does not tell what is reduced during the last backward pass
    batches = [
        [replace(datum, extras=extras_of(datum, slot)) for slot, datum in enumerate(batch[:size])]
        for size, batch in zip((12, 8), data_of(three_steps()))
    ]
    found = pool.run(engine_ranks.whole_and_in_parts, Layout(dp=2), cases, batches, 4)[0]
    for one, parts in found:
        assert parts == one
    assert found[0][0][0].denominator == 1
    assert found[1][0][0].diagnostics["clip_fraction"] > 0


def extras_of(datum: Datum, slot: int) -> dict[str, Any]:
    """Returns log-probabilities close to those of a new model, so that some ratios are clipped."""
    near = [-4.1 + 0.3 * math.sin(slot + place) for place in range(len(datum.input_ids))]
    return {"advantages": (-1.0) ** slot * (1 + slot), "old_logprobs": near, "ref_logprobs": near[::-1]}


def test_rows_that_fill_up_microbatches_count_nothing(pool: Pool) -> None:
    """Three samples lie on two ranks with rows for four; an evaluation has batches of any size."""
    batch = data_of(three_steps())[0][2:5]
    alone = pool.run(engine_ranks.train, Layout(), case(num_layers=1).config(), [batch], 3)[0]
    spread = pool.run(engine_ranks.train, Layout(dp=2), case(4, num_layers=1, dp=2).config(), [batch], 3)[0]
    assert spread.steps[0].denominator == alone.steps[0].denominator
    assert spread.steps[0].tokens == alone.steps[0].tokens
    assert relative(spread.steps[0].grad_norm, alone.steps[0].grad_norm) < 1e-5
    assert spread.evaluation.denominator == alone.evaluation.denominator == alone.steps[0].denominator
    assert relative(spread.evaluation.loss, alone.evaluation.loss) < 1e-5


@pytest.mark.nightly  # by day packed rows: tests/parity/layouts/test_packing.py; an engine that packs: test_extras.py
@pytest.mark.parametrize("case", [case(4, num_layers=1, tp=2, sp=True, dp=2), case(2, pp=2, vpp=2, cp=2)], ids=str)
def test_packed_samples_give_what_they_give_alone(pool: Pool, case: Case) -> None:
    """Packed samples have the same losses and log-probabilities, also in an evaluation in other batches."""
    packed = {"data__isolate_documents": True, "data__packing": {}}
    batches = data_of([[cut(sample, 1 + 5 * slot % SEQ) for slot, sample in enumerate(b)] for b in weighted_steps()])
    batches[1][3] = Datum([5])  # nothing to read
    single = Case(micro_batch_size=8, num_layers=case.num_layers).config()
    alone = pool.run(engine_ranks.train, Layout(), single, batches, 16)[0]
    config = case.config(**packed)
    for found in pool.run(engine_ranks.train, case.resolved(config), config, batches, 16):
        for done, wanted in zip(found.steps, alone.steps, strict=True):
            assert relative(done.loss, wanted.loss) < 1e-5
            assert relative(done.grad_norm, wanted.grad_norm) < 1e-5
            assert done.denominator == pytest.approx(wanted.denominator, rel=1e-12)
            assert done.tokens == wanted.tokens
        theirs = alone.log_probs + alone.entropy
        for likely, wanted in zip(found.log_probs + found.entropy, theirs, strict=True):
            np.testing.assert_allclose(likely, wanted, rtol=0, atol=1e-5)
        assert relative(found.evaluation.loss, alone.evaluation.loss) < 1e-5
        assert found.evaluation.denominator == pytest.approx(alone.evaluation.denominator, rel=1e-12)


def small(**changes: Any) -> Config:
    return case(4, num_layers=2).config(data__kind="mock", metrics__tensorboard=False, **changes)


MUON = {"optimizer__kind": "muon"}
FP16 = {"train__precision": "fp16", "train__initial_loss_scale": 2.0**22}
"""An initial scale at which gradients overflow: some of the first steps are skipped."""


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        # the day shows the others by fp16: one more state, and steps with and without an update
        pytest.param(Layout(tp=2), {"layout__tp": 2}, marks=pytest.mark.nightly),
        pytest.param(Layout(dp=2), {}, marks=pytest.mark.nightly),
        # the optimizer is built in one place for both
        pytest.param(Layout(tp=2), {"layout__tp": 2} | MUON, marks=pytest.mark.nightly),
        (Layout(tp=2), {"layout__tp": 2} | FP16),
    ],
    ids=["tp2", "dp2", "muon", "fp16"],
)
def test_the_numbers_are_those_of_mtrain_train(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    """Numbers agree bit for bit, on the samples that the trainer has read."""
    num_steps = 3 if "train__precision" in changes else 2
    config = small(run__dir=str(tmp_path), train__num_steps=num_steps, **changes)
    stream = StepLoader(config, 0, 1).stream
    batches = [[datum_of(stream.sample(16 * step + slot)) for slot in range(16)] for step in range(num_steps)]
    pool.run(train_fresh, layout, config, seed=config.train.seed)
    ours = pool.run(engine_ranks.train, layout, config, batches, 16, seed=config.train.seed)[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    recorded = [(line["loss"], line["grad_norm"], line["lr"]) for line in lines if line["kind"] == "step"]
    found = [(done.loss, done.grad_norm if done.applied else "NaN", done.lr) for done in ours.steps]
    assert found == recorded
    assert len(numbers(tmp_path)) == num_steps
    applied = [done.applied for done in ours.steps]
    assert all(applied) != ("train__precision" in changes)
    assert applied[-1], "the loss scale has come down"


@pytest.mark.nightly  # the day shows it by test_one_process.py, which closes and opens the same groups
def test_engines_in_one_process_are_those_of_fresh_ones(pool: Pool) -> None:
    """The program has opened torch.distributed itself; each engine has another layout."""
    batches = [batch[:8] for batch in data_of(three_steps())[:2]]
    layouts: list[dict[str, Any]] = [{"layout__tp": 2}, {"layout__pp": 2}, {}]
    configs = [small(**changes) for changes in layouts]
    together = pool.run(engine_ranks.one_after_the_other, Layout(dp=2), configs, batches)
    for number, config in enumerate(configs):
        fresh = pool.run(engine_ranks.train, Layout(dp=2), config, batches, 16)
        for ours, alone in zip(together, fresh, strict=True):
            assert ours[number].steps == alone.steps


def test_an_engine_opens_and_closes_torch_distributed_itself(pool: Pool, tmp_path: Path) -> None:
    batches, config = [data_of(three_steps())[0][:8]], small(layout__tp=2)
    given = (config, batches, free_port(), str(tmp_path / "store"))
    everyone = pool.run(engine_ranks.opened_by_the_engine, Layout(tp=2), *given)
    joined = pool.run(engine_ranks.train, Layout(tp=2), config, batches, 16)[0]
    assert [run.steps for runs in everyone for run in runs] == 4 * [joined.steps]


def test_a_loss_function_of_the_users_own_is_the_one_of_the_configuration(pool: Pool) -> None:
    batch = data_of(weighted_steps())[0][:8]
    configs = [small(**changes) for changes in ({}, {"loss__function": "tests.training.engine_ranks:squared"})]
    ((usual, own, by_name, configured),) = pool.run(engine_ranks.with_losses, Layout(), configs, batch)
    assert own == by_name == configured != usual


@pytest.mark.parametrize("other", [{}, {"layout__pp": 2}], ids=["same layout", "other layout"])
def test_a_new_engine_goes_on_from_a_save(pool: Pool, tmp_path: Path, other: dict[str, Any]) -> None:
    batches = [batch[:8] for batch in data_of(three_steps())[:2]]
    config = small(layout__tp=2)
    went_on = pool.run(engine_ranks.save_and_go_on, Layout(tp=2), config, batches, str(tmp_path), False)[0]
    again = small(**other) if other else config
    loaded = pool.run(engine_ranks.save_and_go_on, Layout(tp=2), again, batches, str(tmp_path), True)[0]
    if not other:
        assert loaded == went_on
    for ours, theirs in zip(loaded, went_on, strict=True):
        assert ours.step == theirs.step
        assert relative(ours.loss, theirs.loss) < 1e-5
        assert replace(ours, loss=0, objective=0, grad_norm=0) == replace(theirs, loss=0, objective=0, grad_norm=0)


OWN_TERM = """
from mtrain import weigh


def own(inputs):
    return weigh({} * inputs.logits.cross_entropy(inputs.labels), inputs)
"""


@pytest.mark.nightly  # faults/test_changed_inputs.py, by the comparison that both make
def test_an_engine_goes_on_by_the_loss_and_the_teacher_of_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Compares what a start compares; a moved teacher is the same one, and consent lets another one in."""
    batch, layout = data_of(three_steps())[0][:4], Layout(dp=2)
    for name, seed in (("teacher", 1), ("other", 2)):
        config = small(train__seed=seed)
        pool.run(engine_ranks.train, layout, config, [batch], 4, str(tmp_path / name))
    shutil.copytree(tmp_path / "teacher", tmp_path / "moved")
    (tmp_path / "my_engine_term.py").write_text(OWN_TERM.format(2.0))

    def config_of(function: str, teacher: str, allowed: str | None = None) -> Config:
        term = {"kl": {"function": "distillation", "coefficient": 0.5}}
        consent = {} if allowed is None else {"checkpoint__allow_changed": [allowed]}
        named = {"checkpoint": str(tmp_path / teacher)}
        return small(loss__function=function, loss__side_terms=term, loss__teacher=named, **consent)

    def found(
        run: str, function: str, teachers: Sequence[str], allowed: str, sources: dict[str, str]
    ) -> list[list[str]]:
        others = [config_of(function, each) for each in teachers] + [config_of(function, teachers[-1], allowed)]
        given = (config_of(function, "teacher"), others, batch, tmp_path / run, sources)
        refusals: list[list[str]] = pool.run(engine_ranks.with_other_inputs, layout, *given)[0]
        return refusals

    moved, *refused, consented = found("a", "next_token", ["moved", "other"], "loss.teacher.checkpoint", {})
    assert moved == consented == ["", ""]
    changed = {"my_engine_term.py": OWN_TERM.format(3.0)}
    again, permitted = found("b", "my_engine_term:own", ["teacher"], "loss.function", changed)
    assert permitted == ["", ""]
    for refusals, key in ((refused[0], "loss.teacher.checkpoint"), (again, "loss.function")):
        assert all(f"checkpoint.allow_changed=[{key}]" in each for each in refusals), "neither loaded nor saved"


@pytest.mark.nightly  # adapters begin as the frozen model: tests/core/adapters/test_first_values.py
def test_without_its_adapters_a_model_is_the_one_that_never_had_any(pool: Pool) -> None:
    """Log-probabilities and a loss agree to the bit, after a step that has moved the adapters."""
    batch = data_of(three_steps())[0][:4]
    config = small(layout__tp=2, adapter={"rank": 2})
    for found in pool.run(engine_ranks.with_adapters_off, Layout(tp=2), config, batch):
        assert found["off"] == found["plain"] != found["on"] == found["on again"]


@pytest.mark.nightly  # export/test_export.py, of a run
def test_an_export_is_what_transformers_computes_with(pool: Pool, tmp_path: Path) -> None:
    config, batch = small(layout__tp=2), data_of(three_steps())[0][:2]
    pool.run(engine_ranks.exported, Layout(tp=2), config, str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the scratch checkpoint is gone"
    found = pool.run(engine_ranks.log_probs, Layout(tp=2), config, batch)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for datum, ours in zip(batch, found, strict=True):
        ids = torch.tensor([list(datum.input_ids)])
        with torch.no_grad():
            theirs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-5)


MISTAKES = {
    "empty": "DataError: the batch has no sample, but at least one is needed; skip the call if there is none",
    "nothing to look at": "DataError: the batch has no sample",
    "nothing to score": "DataError: the batch has no sample",
    "nothing to evaluate": "DataError: the batches have no sample, but at least one is needed",
    "empty batches": "DataError: the batches have no sample",
    "nothing to answer": "$",
    "not a pair": "ConfigError: loss.function='_mean' returned a value of type Tensor, but has to return a",
    "unknown loss": "ConfigError: loss.function='ppoo' is not known; choose next_token",
    "unknown option": r"ConfigError: loss.function='.*:raised' has the signature .* the options pover",
    "no temperature": "ConfigError: loss entropy: options.temperature=-1 must be a number above 0",
    "a correction without a bound": "ConfigError: loss ppo: options.rollout_correction needs a bound",
    "options of a function": r"ConfigError: loss squared has the signature .* the options power, but got an unexpected",
    "nothing to step": "RuntimeError: optim_step needs a forward_backward before it",
    "second engine": "ConfigError: this process already has megatron-core's process groups",
    "not finite": "NonFiniteError: the loss of term 'main' is (inf|nan)",
    "closed": "RuntimeError: this Engine is closed",
}
SAMPLES = {
    "no tokens": r"DataError: sample 1 has input_ids of shape \[0\], but needs one row of 1 to 33 tokens",
    "too long": r"DataError: sample 0 has input_ids of shape \[34\], but needs one row of 1 to 33 tokens",
    "unknown id": r"DataError: sample 0: input_ids\[1\] is 97, but must be .* from 0 to 60 \(model.vocab_size=61\)",
    "weights": r"DataError: sample 0 has 3 input_ids, but weights of shape \[2\]; give one weight per token",
    "negative": "DataError: sample 0 has a weight that is negative or not finite",
    "a float": r"DataError: sample 1: input_ids\[1\] is 2.9 \(float\), but must be a whole number from 0 to 60",
    "no batch": "DataError: the batch is of type NoneType, but must be a list of Datum",
    "a datum alone": "DataError: the batch is of type Datum, but must be a list of Datum",
    "a batch that runs out": "DataError: the batch is of type list_iterator, but must be a list of Datum",
    "rows without Datum": r"DataError: sample 1 is of type list, but must be a Datum, such as Datum\(\[1, 2, 3\]\)",
    "one batch of evaluate": "DataError: the batch is of type Datum, but must be a list of Datum",
    "no batches": "DataError: batches are of type int, but must be lists of Datum, one a batch",
    "a text": r"DataError: sample 0: input_ids\[0\] is 'a' \(str\), but must be a whole number from 0 to 60",
    "a boolean": r"DataError: sample 0: input_ids\[1\] is True \(bool\), but must be a whole number from 0 to 60",
    "a number for ids": "DataError: sample 0: input_ids is 5, but must be a row of token ids",
    "texts as weights": r"DataError: sample 0: weights\[0\] is 'a', but must be a number",
    "extras in a list": "DataError: sample 0 has extras of type list, but they must be a mapping by name",
    "a member in a mapping": "DataError: sample 0 has a member of type dict, but it must be a GroupMember",
    "prompts of text": "ValueError: prompts are of type str, but must be a list of rows of token ids",
    "one prompt": "ValueError: prompt 0 is 1, but must be a row of token ids",
    "no list of prompts": "ValueError: prompts are of type NoneType, but must be a list of rows of token ids",
    "sampling in a mapping": r"ValueError: sampling is of type dict, but must be SamplingParams\(...\)",
    "half a sequence": "ValueError: max_sequences is 0.5, but must be a whole number of at least 1",
    "a configuration as text": "ConfigError: Engine needs a Config from load_config, but got a str",
    "a prompt of floats": r"ValueError: prompt 1\[0\] is 1.7 \(float\), but must be a whole number from 0 to 60",
    "an empty prompt": "ValueError: prompt 0 has no token",
}


def assert_named(answers: list[list[str]], expected: dict[str, str]) -> None:
    """Compares the messages of every rank."""
    for messages in answers:
        for (name, pattern), message in zip(expected.items(), messages, strict=True):
            assert re.match(pattern, message), f"{name}: {message}"


def test_mistakes_are_named_and_leave_nothing_behind(pool: Pool) -> None:
    assert_named(pool.run(engine_ranks.messages_of, Layout(tp=2), small(layout__tp=2), list(MISTAKES)), MISTAKES)


@pytest.mark.fault(
    "input",
    "a sample or a prompt given to Engine that is empty, too long, of impossible weights, or of ids that are floats, "
    "booleans, texts or beyond the vocabulary",
    happens="an error names the sample, the place and what is allowed, on every rank; the engine can go on",
    exit_code=3,
)
def test_a_sample_that_cannot_be_is_named(pool: Pool, notice: Notice) -> None:
    with notice:
        answers = pool.run(engine_ranks.messages_of, Layout(tp=2), small(layout__tp=2), list(SAMPLES))
    assert_named(answers, SAMPLES)
    assert DataError.exit_code == notice.exit_code


def test_close_all_after_a_failure_lets_another_engine_start(pool: Pool) -> None:
    config, batch = small(layout__tp=2, train__recompute="full"), data_of(three_steps())[0][:8]
    answers = pool.run(engine_ranks.close_all_after_a_failure, Layout(tp=2), config, batch)
    for rank, (first, again) in enumerate(answers):
        assert first == again
        place = f"layout {Layout(tp=2)}, rank {rank} of 2 on cpu"
        assert re.fullmatch(rf"<Engine: [\d,]+ parameters in 2 layers; {place}; step 0>", first[0])


def test_terms_of_other_denominators_need_the_whole_batch_in_one_call(pool: Pool) -> None:
    apart = {"z": {"function": "z_loss", "coefficient": 0.1, "aggregation": "seq-mean-token-sum"}}
    (found,) = pool.run(engine_ranks.messages_of, Layout(), small(loss__side_terms=apart), ["a second call"])
    assert found[0].startswith("ConfigError: the loss terms z have separate denominators"), found
    alike = {"z": {"function": "z_loss", "coefficient": 0.1}}
    assert pool.run(engine_ranks.messages_of, Layout(), small(loss__side_terms=alike), ["a second call"]) == [[""]]
