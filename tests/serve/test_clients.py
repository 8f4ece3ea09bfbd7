"""The unmodified SDK against services on one and two ranks: every number is the oracle's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import RequestFailedError, types

from mtrain.config import Config
from mtrain.serve.operations import Lora
from mtrain.serve.served import Served
from mtrain.verify.reference.model.adapters import all_shapes
from tests.fault_table import Notice
from tests.parity.cases import Case, case
from tests.parity.compare import at_night, relative
from tests.parity.expert_models import MIXTRAL
from tests.pool import Pool
from tests.reference import Parameters
from tests.serve import service_ranks
from tests.serve.oracle import Oracle
from tests.serve.service import datum, rest_client, running, sequences, session
from tests.training.test_engine import parameters_of

pytestmark = pytest.mark.waits  # for the SDK, which asks for results now and then
ADAM = {"learning_rate": 0.004, "beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.05, "grad_clip_norm": 2.0}
LENGTHS = (5, 20, 31, 7, 1, 12)
VOCAB = 61
LAYOUTS = [
    case(2, num_layers=1),
    case(2, num_layers=1, tp=2),
    case(2, num_layers=1, dp=2),
    case(2, num_layers=1, cp=2),
    case(2, num_layers=2, pp=2),
    case(2, num_layers=1, dp=2, ep=2),
]


@pytest.fixture(scope="module")
def shared(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serves on one rank, for tests that each have a session of their own; yields the address."""
    with running(pool, LAYOUTS[0], LAYOUTS[0].config(), tmp_path_factory.mktemp("shared") / "base") as address:
        yield address


def named(one: Case) -> str:
    return "-".join(f"{axis}{size}" for axis, size in one.layout.items()) or "one"


def inputs_of(loss: str, tokens: list[int], seed: int) -> dict[str, Any]:
    rng, size = np.random.default_rng(seed), len(tokens) - 1
    if loss == "cross_entropy":
        return {"weights": rng.normal(size=size).astype(np.float32)}
    near = rng.normal(-4.1, 0.3, size).astype(np.float32)
    advantages = (rng.normal(size=size) * (rng.random(size) < 0.8)).astype(np.float32)
    mask = (rng.random(size) < 0.6).astype(np.float32)
    is_masked = loss == "gspo" and seed % 2 == 1  # of some sequences
    return {"logprobs": near, "advantages": advantages} | ({"sequence_ratio_mask": mask} if is_masked else {})


def saved(folder: Path, path: str, config: Config) -> Parameters:
    """Returns the weights of a checkpoint by the oracle's names, without the padding of the vocabulary."""
    place = folder / "served" / path.removeprefix("tinker://") / "checkpoints"
    (step,) = place.glob("step_*")
    shapes = all_shapes(config)
    return {name: values[: shapes[name][0]] for name, values in parameters_of(step).items()}


def run_steps(client: Any, oracle: Oracle, losses: list[str], tolerance: float = 1e-5) -> None:
    """Makes a step with each loss, and compares all that a client sees with the oracle."""
    tokens = sequences(3, LENGTHS, VOCAB)
    for number, loss in enumerate(losses):
        inputs = [inputs_of(loss, each, 10 * number + place) for place, each in enumerate(tokens)]
        data = [datum(each, given) for each, given in zip(tokens, inputs, strict=True)]
        found = client.forward_backward(data, loss)
        updated = client.optim_step(types.AdamParams(**ADAM))
        total, log_probs = oracle.forward_backward(tokens, loss, inputs)
        norm = oracle.step(ADAM)
        output = found.result()
        assert abs(output.metrics["loss:sum"] - total) < tolerance * max(1.0, sum(map(len, log_probs))), loss
        for ours, theirs in zip(output.loss_fn_outputs, log_probs, strict=True):
            np.testing.assert_allclose(ours["logprobs"].to_numpy(), theirs.numpy(), rtol=0, atol=tolerance)
        assert relative(updated.result().metrics["grad_norm"], norm) < tolerance


def worst(found: Mapping[str, torch.Tensor], oracle: Oracle) -> float:
    """Returns the largest deviation of a tensor that was trained, relative to its norm."""
    trained = {name: each for name, each in oracle.parameters.items() if each.requires_grad}
    assert trained.keys() <= found.keys()
    return max(float((found[name] - each.detach()).norm() / each.detach().norm()) for name, each in trained.items())


def config_of(one: Case, lora: Lora) -> Config:
    return Served(one.config()).adapted(lora)


LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"]


# tp2 and pp2 show what one rank does, and the checkpoint under another layout what dp2 does
@pytest.mark.parametrize(
    ("one", "losses"),
    [
        (LAYOUTS[1], LOSSES),
        # the engine computes every loss: on these axes the day sees that its numbers arrive, whole and clipped
        at_night(LAYOUTS[3], LOSSES[::2]),  # test_sampler_and_trainer.py has cp by day
        at_night(LAYOUTS[4], LOSSES[::2]),  # an engine in a pipeline: tests/training/test_engine.py
        (LAYOUTS[5], LOSSES[::2]),
        # by the engine: test_engine.py and test_adapters.py in tests/training
        at_night(case(2, num_layers=1, dp=2, shard="weights"), LOSSES[::2]),
        *(at_night(each, LOSSES * 2) for each in LAYOUTS),
    ],
    ids=lambda value: named(value) if isinstance(value, Case) else str(len(value)),
)
def test_an_adapter_is_the_oracles_after_every_step(pool: Pool, tmp_path: Path, one: Case, losses: list[str]) -> None:
    """Every loss, per-datum log-probabilities, norms, and the adapter after the last step; what is saved goes on."""
    folder, config = tmp_path / "base", one.config(**MIXTRAL if "ep" in one.layout else {})
    with running(pool, one, config, folder) as address:
        with session(address) as service:
            whole = service.create_lora_training_client("base", rank=0).result()
            base = saved(folder, whole.save_state("start").result().path, config)
            assert whole.get_info().is_lora is False
        with session(address) as service:
            check_adapter(service, folder, Served(config).adapted(Lora(rank=4)), base, losses)


def check_adapter(service: Any, folder: Path, config: Config, base: Parameters, losses: list[str]) -> None:
    client = service.create_lora_training_client("base", rank=4, seed=5).result()
    first = client.save_state("start").result().path
    oracle = Oracle(config, base | saved(folder, first, config))
    run_steps(client, oracle, losses)
    last = client.save_state("end").result().path
    assert worst(saved(folder, last, config), oracle) < 1e-5
    again = service.create_training_client_from_state_with_optimizer(last).result()
    run_steps(again, oracle, ["cross_entropy"])


@pytest.mark.nightly  # restarts: test_restart.py; other layouts: tests/core/adapters/test_adapter_state.py
def test_a_checkpoint_goes_on_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    folder, (_, tensor, data, *_) = tmp_path / "base", LAYOUTS
    config = config_of(tensor, Lora(rank=4))
    with running(pool, tensor, tensor.config(), folder) as address:
        with session(address) as service:
            whole = service.create_lora_training_client("base", rank=0).result().save_state("whole").result().path
        with session(address) as service:
            client = service.create_lora_training_client("base", rank=4, seed=5).result()
            first = client.save_state("start").result().path
            oracle = Oracle(config, saved(folder, whole, tensor.config()) | saved(folder, first, config))
            run_steps(client, oracle, ["cross_entropy", "ppo"])
            last = client.save_state("end").result().path
    with running(pool, data, data.config(), folder) as address, session(address) as service:
        again = service.create_training_client_from_state_with_optimizer(last).result()
        run_steps(again, oracle, ["cross_entropy", "cispo"])


def batch(seed: int) -> list[types.Datum]:
    return [datum(each, {"weights": np.ones(len(each) - 1, np.float32)}) for each in sequences(seed, LENGTHS, VOCAB)]


def seen(future: Any) -> list[list[float]]:
    return [each["logprobs"].tolist() for each in future.result().loss_fn_outputs]


ADAPTERS: dict[int, dict[str, Any]] = {1: {"rank": 2}, 2: {"rank": 5, "train_mlp": False}, 3: {"rank": 2}}
"""Options of adapters by seed; two have the same shape."""


def created(service: Any, seed: int) -> Any:
    return service.create_lora_training_client("base", seed=seed, **ADAPTERS[seed]).result()


def trained_alone(service: Any, seed: int) -> list[list[list[float]]]:
    """Makes three steps of two calls each."""
    client, found = created(service, seed), []
    for step in range(3):
        calls = [client.forward_backward(batch(10 * seed + 2 * step + call), "cross_entropy") for call in (0, 1)]
        client.optim_step(types.AdamParams(**ADAM)).result()
        found += [seen(each) for each in calls]
    return found


@pytest.mark.nightly  # by day tests/training/test_adapters.py, by the engine
@pytest.mark.parametrize("one", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_models_that_take_turns_are_what_each_is_alone(pool: Pool, tmp_path: Path, one: Case) -> None:
    """Compares to the bit, also where one is sampled from or left with half a gradient while others train."""
    with running(pool, one, one.config(), tmp_path / "base") as address:
        with session(address) as service:
            alone = [trained_alone(service, seed) for seed in ADAPTERS]
        with session(address) as service:
            clients = [created(service, seed) for seed in ADAPTERS]
            found: list[list[list[list[float]]]] = [[] for _ in ADAPTERS]
            for step in range(3):
                for call in (0, 1):
                    for each, (client, seed) in enumerate(zip(clients, ADAPTERS, strict=True)):
                        data = batch(10 * seed + 2 * step + call)
                        found[each].append(seen(client.forward_backward(data, "cross_entropy")))
                sampler = clients[0].save_weights_and_get_sampling_client().result()
                sampler.sample(types.ModelInput.from_ints([3]), 1, types.SamplingParams(max_tokens=2)).result()
                for client in reversed(clients):
                    client.optim_step(types.AdamParams(**ADAM)).result()
            with pytest.raises(RequestFailedError, match="rank 2 on qkv, proj, fc1, fc2, output"):
                service.create_lora_training_client("base", rank=0).result()
    assert found == alone


def test_a_sampler_outlives_the_request_for_a_model_of_another_kind(pool: Pool, tmp_path: Path) -> None:
    one, prompt = LAYOUTS[0], types.ModelInput.from_ints([3])
    with running(pool, one, one.config(), tmp_path / "base") as address:
        with session(address) as service:
            client = service.create_lora_training_client("base", rank=2).result()
            path = client.save_weights_for_sampler("one").result().path
        with session(address) as service:
            sampler = service.create_sampling_client(model_path=path).result()
            first = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3, temperature=0)).result()
            with pytest.raises(RequestFailedError, match="close the other sessions first"):
                service.create_lora_training_client("base", rank=0).result()
            again = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3, temperature=0)).result()
    assert again.sequences[0].tokens == first.sequences[0].tokens


def test_adapters_of_a_shape_that_nobody_uses_are_freed(pool: Pool, tmp_path: Path) -> None:
    one = LAYOUTS[0]
    (found,) = pool.run(service_ranks.shapes, one.resolved(one.config()), one.config(), str(tmp_path))
    assert found == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(("one", "num_broadcasts"), [(LAYOUTS[0], 0), (LAYOUTS[2], 4)], ids=["one", "dp2"])
def test_ranks_agree_on_a_call_by_one_broadcast_and_one_rank_by_none(
    pool: Pool, tmp_path: Path, one: Case, num_broadcasts: int
) -> None:
    config = one.config()
    found = pool.run(service_ranks.broadcasts, one.resolved(config), config, str(tmp_path))
    assert found == [num_broadcasts] * len(found)


def test_every_rank_ends_without_the_process_that_speaks_http(pool: Pool, tmp_path: Path) -> None:
    one = LAYOUTS[2]
    config = one.config()
    (text, is_on_every_rank), other = pool.run(service_ranks.lost, one.resolved(config), config, str(tmp_path))
    assert "start the service again" in text
    assert is_on_every_rank
    assert other == (text, True)


def test_a_custom_loss_and_a_batch_in_chunks_are_one_gradient(shared: str) -> None:
    """A loss of the client's own goes there and back; chunks that arrive in any order give the same bits."""
    with session(shared) as service:
        clients = [service.create_lora_training_client("base", rank=2, seed=3).result() for _ in range(3)]

        def squares(data: Any, log_probs: Any) -> Any:
            return torch.stack([(each**2).sum() for each in log_probs]).sum(), {}

        custom = clients[0].forward_backward_custom(batch(1), squares).result()
        log_probs = [torch.tensor(each) for each in seen(clients[1].forward(batch(1), "cross_entropy"))]
        assert custom.metrics["loss:sum"] == pytest.approx(float(sum((each**2).sum() for each in log_probs)), rel=1e-6)
        weighted = [
            datum(tokens, {"weights": (-2 * each).numpy()})
            for tokens, each in zip(sequences(1, LENGTHS, VOCAB), log_probs, strict=True)
        ]
        clients[1].forward_backward(weighted, "cross_entropy").result()
        smaller = service.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
        service.holder._client_config = smaller
        clients[2].forward_backward(weighted, "cross_entropy").result()
        norms = [each.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"] for each in clients]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert norms[1] == norms[2]


def test_several_targets_of_a_token_are_as_many_batches(shared: str) -> None:
    rng, tokens = np.random.default_rng(4), sequences(4, (5, 9), VOCAB)
    targets = [rng.integers(0, VOCAB, (len(each) - 1, 3)) for each in tokens]
    weights = [rng.normal(size=each.shape).astype(np.float32) for each in targets]

    def sent(columns: Any) -> list[types.Datum]:
        given = zip(tokens, targets, weights, strict=True)
        return [datum(each, {"target_tokens": t[:, columns], "weights": w[:, columns]}) for each, t, w in given]

    with session(shared) as service:
        clients = [service.create_lora_training_client("base", rank=2, seed=3).result() for _ in range(2)]
        whole = clients[0].forward_backward(sent(slice(None)), "cross_entropy").result()
        parts = [clients[1].forward_backward(sent(place), "cross_entropy").result() for place in range(3)]
        norms = [each.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"] for each in clients]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert whole.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in parts), abs=1e-4)
    for number, output in enumerate(whole.loss_fn_outputs):
        expected = np.stack([each.loss_fn_outputs[number]["logprobs"].to_numpy() for each in parts], axis=-1)
        np.testing.assert_allclose(output["logprobs"].to_numpy(), expected, rtol=0, atol=1e-5)


def test_answers_are_of_the_weights_that_were_kept(shared: str) -> None:
    """Snapshots and saved samplers stay what they were while training continues; trainer and sampler agree."""
    prompt, greedy = types.ModelInput.from_ints([3, 4, 5]), types.SamplingParams(max_tokens=8, temperature=0)
    with session(shared) as service:
        client = service.create_lora_training_client("base", rank=2, seed=3).result()
        base = service.create_sampling_client(base_model="base").result()
        before = base.sample(prompt, 2, greedy).result().sequences
        client.forward_backward(batch(1), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        kept = client.save_weights_and_get_sampling_client().result()
        path = client.save_weights_for_sampler("after-one").result().path
        answer = kept.sample(prompt, 1, greedy, include_prompt_logprobs=True).result()
        tokens = answer.sequences[0].tokens
        assert tokens != before[0].tokens
        forward = client.forward([datum([3, 4, 5, *tokens], {})], "cross_entropy").result()
        likely = forward.loss_fn_outputs[0]["logprobs"].tolist()
        np.testing.assert_allclose(answer.prompt_logprobs[1:] + answer.sequences[0].logprobs, likely, atol=1e-5)
        whole = kept.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, *tokens])).result()
        assert whole == [None, *likely], "the same weights, kernels and shapes: a difference of exactly 0"
        client.forward_backward(batch(2), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        named = service.create_sampling_client(model_path=path).result()
        for sampler in (kept, named):
            assert sampler.sample(prompt, 1, greedy).result().sequences[0].tokens == tokens
        again = base.sample(prompt, 2, greedy).result().sequences
        assert [each.tokens for each in again] == [each.tokens for each in before]
        drawn = [kept.sample(prompt, 3, types.SamplingParams(max_tokens=9, seed=5, stop=[tokens[0]])) for _ in range(2)]
        first, second = ([each.tokens for each in future.result().sequences] for future in drawn)
        assert first == second


@pytest.mark.fault(
    "clients",
    "tokens beyond the vocabulary, nan in the inputs of a loss, a loss that is not offered",
    happens="the future fails with the reason, and so does the step's optim_step: no half of a batch is applied",
    exit_code=None,
)
def test_what_is_refused_is_said_in_the_sdks_words(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    one = LAYOUTS[0]
    with running(pool, one, one.config(), tmp_path / "base") as address, session(address) as service:
        with pytest.raises(tinker.BadRequestError, match="base_model='other' is not served here"):
            service.create_lora_training_client("other").result()
        client = service.create_lora_training_client("base", rank=2).result()
        tokens = sequences(1, (4,), VOCAB)[0]
        wrong = {
            "dro": (datum(tokens, {}), "loss_fn='dro' is not offered"),
            "ppo": (datum(tokens, {}), "ppo reads target_tokens, logprobs, advantages"),
            "cross_entropy": (datum([*tokens, VOCAB], {}), "beyond the vocabulary"),
            "importance_sampling": (
                datum(tokens, {"logprobs": np.full(4, np.nan, np.float32), "advantages": np.ones(4, np.float32)}),
                "not finite",
            ),
        }
        for loss, (data, reason) in wrong.items():
            with notice, pytest.raises(RequestFailedError, match=reason):
                client.forward_backward([data], loss).result()
        with pytest.raises(RequestFailedError, match="so no update was made"):
            client.optim_step(types.AdamParams()).result()
        with pytest.raises(RequestFailedError, match="needs a forward_backward before it"):
            client.optim_step(types.AdamParams()).result()
        with pytest.raises(tinker.BadRequestError, match="cannot be the name of a checkpoint"):
            client.save_state("../../outside").result()
        poisoned = service.create_lora_training_client("base", rank=2).result()
        poisoned.save_state("one").result()
        with pytest.raises(RequestFailedError, match="already exists"):
            poisoned.save_state("one").result()
        poisoned.forward_backward([datum(tokens, {})], "cross_entropy")
        poisoned.save_state("one", overwrite=True, user_metadata={"a": "b"}).result()
        assert poisoned.optim_step(types.AdamParams()).result().metrics["step"] == 1
        with rest_client(address) as rest:
            (found,) = rest.list_checkpoints(poisoned.model_id).result().checkpoints
            assert found.user_metadata == {"a": "b"}
            rest.delete_checkpoint(poisoned.model_id, found.checkpoint_id).result()
            assert rest.list_checkpoints(poisoned.model_id).result().checkpoints == []
