"""What ranks do in the tests of `Engine`; the functions for `Pool.run`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

import mtrain
from mtrain import (
    ConfigError,
    DataError,
    Datum,
    Engine,
    EvalResult,
    LossPair,
    MtrainError,
    SamplingParams,
    StepResult,
    TermInputs,
    weigh,
)
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.training.one_process import in_a_thread

Batch = list[Datum]


class Run(NamedTuple):
    """Results of a rank; the same on all ranks."""

    steps: list[StepResult]
    log_probs: list[Any]
    """Log-probabilities of the last batch after the last step, as numpy; so is the next field."""
    entropy: list[Any]
    evaluation: EvalResult


def squared(inputs: TermInputs) -> LossPair:
    """A user's own loss function."""
    return weigh(inputs.logits.cross_entropy(inputs.labels).square(), inputs)


@contextlib.contextmanager
def free(groups: Groups) -> Iterator[None]:
    """Removes the pool's process groups but keeps its torch.distributed, as in a program that has opened it itself."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    assert dist.is_initialized(), "an engine leaves open what it has not opened"
    assert not parallel_state.is_initialized()
    assert set(dist.distributed_c10d._world.pg_map) <= before


def train(groups: Groups, config: Config, batches: Sequence[Batch], size: int, save_to: str | None = None) -> Run:
    """Makes one step for each batch, in calls of `size` samples."""
    with free(groups), Engine(config) as engine:
        return steps_of(engine, batches, size, save_to)


def steps_of(engine: Engine, batches: Sequence[Batch], size: int, save_to: str | None = None) -> Run:
    """Trains like `train`; saves the initial weights and the last ones."""
    if save_to is not None:
        engine.save(save_to)
    done = []
    for batch in batches:
        for start in range(0, len(batch), size):
            engine.forward_backward(batch[start : start + size])
        done.append(engine.optim_step())
    if save_to is not None:
        engine.save(save_to)
    found = engine.forward(batches[-1], entropy=True)
    log_probs, entropy = ([each.numpy() for each in values] for values in (found.log_probs, found.entropy))
    return Run(done, log_probs, entropy, engine.evaluate(batches))


def set_aside(groups: Groups, config: Config, batches: Sequence[Batch], other: Batch) -> list[list[Any]]:
    """Makes some steps of two calls, and again on an engine where another model takes a turn between all calls; with
    answers of the weights before each update."""
    found: list[list[Any]] = []
    with free(groups):
        for takes_turns in (False, True):
            with Engine(config) as engine:
                found.append([])
                for batch in batches:
                    half = len(batch) // 2
                    for call in (batch[:half], batch[half:]):
                        engine.forward_backward(call)
                        state, sampled = engine.hold(), engine.hold(weights_only=True)
                        if takes_turns:
                            engine.begin_anew()
                            engine.forward_backward(other)
                            engine.optim_step(0.1)
                            engine.put_back(sampled)
                        found[-1].append(engine.generate([[3], [5, 7]], SamplingParams(max_new_tokens=6)))
                        if takes_turns:
                            engine.put_back(state)
                    found[-1].append(engine.optim_step(0.01))
                found[-1].append([each.tolist() for each in engine.forward(other).log_probs])
    return found


class Calls(NamedTuple):
    """A run whose steps are given in one call or in several."""

    config: Config
    loss: str | None = None
    options: dict[str, Any] | None = None


def whole_and_in_parts(
    groups: Groups, cases: Sequence[Calls], batches: Sequence[Batch], size: int
) -> list[list[list[StepResult]]]:
    """Returns, for each case, the steps of one call each, and those of calls of `size` samples."""
    found: list[list[list[StepResult]]] = []
    with free(groups):
        for config, loss, options in cases:
            found.append([])
            for of_call in (len(batches[0]), size):
                with Engine(config) as engine:
                    steps = []
                    for batch in batches:
                        for start in range(0, len(batch), of_call):
                            engine.forward_backward(batch[start : start + of_call], loss, options)
                        steps.append(engine.optim_step())
                    found[-1].append(steps)
    return found


def one_after_the_other(groups: Groups, configs: Sequence[Config], batches: Sequence[Batch]) -> list[Run]:
    """Trains one engine for each configuration, in one process."""
    runs = []
    with free(groups):
        for config in configs:
            with Engine(config) as engine:
                runs.append(steps_of(engine, batches, len(batches[0])))
    return runs


def opened_by_the_engine(groups: Groups, config: Config, batches: Sequence[Batch], port: int, store: str) -> list[Run]:
    """Trains twice like a program under a launcher, the second time in a thread."""
    rank, size = str(groups.rank), str(groups.layout.world_size)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = []

    def work() -> None:
        engine = Engine(config)
        runs.append(steps_of(engine, batches, len(batches[0])))
        engine.close()
        engine.close()
        assert not dist.is_initialized()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    work()
    in_a_thread(work)
    assert handlers == {number: signal.getsignal(number) for number in handlers}, "signals are the program's"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))  # to be closed
    dist.barrier()  # else the first rank to finish closes connections that the other still makes
    return runs


def raised(inputs: TermInputs, power: float) -> LossPair:
    """A user's own loss function with an option."""
    return weigh(inputs.logits.cross_entropy(inputs.labels) ** power, inputs)


NAMED = "tests.training.engine_ranks:raised"


def with_losses(groups: Groups, configs: Sequence[Config], batch: Batch) -> list[tuple[float, float, float]]:
    """Returns (loss, grad_norm, loss of an evaluation) of one step: of the first configuration with its own loss, with
    the user's, with the same by its name; of the second with its own."""
    found = []
    with free(groups):
        first, second = configs
        losses = [(first, None, None), (first, squared, None), (first, NAMED, {"power": 2.0}), (second, None, None)]
        for config, loss, options in losses:
            with Engine(config) as engine:
                before = engine.evaluate([batch], loss, options).loss
                engine.forward_backward(batch[:4], loss, options)
                engine.forward_backward(batch[4:], loss, options)
                done = engine.optim_step()
                found.append((done.loss, done.grad_norm, before))
    return found


def save_and_go_on(
    groups: Groups, config: Config, batches: Sequence[Batch], folder: str, load: bool
) -> list[StepResult]:
    """Returns the steps after a save: of the engine that has saved, or of a new one that loads."""
    with free(groups):
        if load:
            with Engine(config) as engine:
                engine.forward_backward(batches[0])  # discarded by the load
                engine.load(folder)
                return [_step(engine, batch) for batch in batches[engine.step :]]
        with Engine(config) as engine:
            _step(engine, batches[0])
            assert engine.save(folder) == Path(folder, "checkpoints", "step_00000001")
            return [_step(engine, batch) for batch in batches[1:]]


def with_other_inputs(
    groups: Groups, first: Config, others: Sequence[Config], batch: Batch, folder: Path, sources: Mapping[str, str]
) -> list[list[str]]:
    """Saves by the first configuration, then puts `sources` next to the folder and loads and saves by each of the
    others; returns what was refused."""
    sys.path.insert(0, str(folder.parent))
    found = []
    with free(groups):
        with Engine(first) as engine:
            _step(engine, batch)
            engine.save(folder)
        for name, text in sources.items():
            Path(folder.parent, name).write_text(text)
        for config in others:
            with Engine(config) as engine:
                refusals = [_refusal(lambda: engine.load(folder))]
                if engine.step == 0:
                    _step(engine, batch)
                _step(engine, batch)
                refusals.append(_refusal(lambda: engine.save(folder)))
                found.append(refusals)
    return found


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except DataError as error:
        return str(error)
    return ""


def _step(engine: Engine, batch: Batch) -> StepResult:
    engine.forward_backward(batch)
    return engine.optim_step()


def exported(groups: Groups, config: Config, folder: str) -> None:
    """Writes a Hugging Face folder; a second call is refused."""
    with free(groups), Engine(config) as engine:
        engine.export_hf(folder)
        with pytest.raises(ConfigError, match="exists and is not overwritten"):
            engine.export_hf(folder)


def log_probs(groups: Groups, config: Config, batch: Batch) -> list[Any]:
    """Returns log-probabilities under the first weights, as numpy."""
    with free(groups), Engine(config) as engine:
        return [each.numpy() for each in engine.forward(batch).log_probs]


def with_adapters_off(groups: Groups, config: Config, batch: Batch) -> dict[str, Any]:
    """Returns log-probabilities and a loss: with trained adapters, without them, and of a model that never had any."""
    found = {}
    with free(groups):
        with Engine(config) as engine:
            engine.forward_backward(batch)
            engine.optim_step(lr=0.1)
            found["on"] = _scores(engine, batch)
            with engine.adapters_off():
                found["off"] = _scores(engine, batch)
                with pytest.raises(RuntimeError, match="nothing to train"):
                    engine.forward_backward(batch)
            found["on again"] = _scores(engine, batch)
        with Engine(config.model_copy(update={"adapter": None})) as engine:
            found["plain"] = _scores(engine, batch)
            with pytest.raises(ConfigError, match="adapters_off needs a model with adapters"), engine.adapters_off():
                raise AssertionError("not reached")
    return found


def _scores(engine: Engine, batch: Batch) -> Any:
    result = engine.forward(batch)
    assert result.entropy == []
    return [each.tolist() for each in result.log_probs], engine.evaluate([batch]).loss


def forward_at(groups: Groups, config: Config, batch: Batch) -> list[list[Any]]:
    """Returns log-probabilities at 0.7 of each sample, at 0.7 of the call, without one, and at 1."""
    of_samples = [replace(datum, temperature=0.7) for datum in batch]
    without = [replace(datum, temperature=None) for datum in batch]
    with free(groups), Engine(config) as engine:
        found = [
            engine.forward(of_samples),
            engine.forward(batch, temperature=0.7),
            engine.forward(without),
            engine.forward(batch, temperature=1.0),
        ]
        with pytest.raises(DataError, match="temperature is nan"):
            engine.forward(batch, temperature=math.nan)
    return [[each.numpy() for each in result.log_probs] for result in found]


def _broken(inputs: TermInputs) -> LossPair:
    raise ZeroDivisionError("as in a cell of a notebook")


def close_all_after_a_failure(groups: Groups, config: Config, batch: Batch) -> list[tuple[str, float, float]]:
    """Trains a step; fails in the middle of a pass and loses the engine's name; closes all; trains the step again."""
    found, failed = [], []
    with free(groups):
        for has_failed in (False, True):
            before = set(threading.enumerate())
            engine = Engine(config)
            shown = repr(engine)
            result = _step(engine, batch)
            found.append((shown, result.loss, result.grad_norm))
            if not has_failed:
                try:
                    engine.forward_backward(batch, _broken)
                except ZeroDivisionError as error:
                    failed.append(error)  # as sys.last_value does, it holds the frames and with them the engine
                with pytest.raises(ConfigError, match=r"close that first, with mtrain.close_all\(\)"):
                    Engine(config)
            mtrain.close_all()
            assert not parallel_state.is_initialized()
            assert set(threading.enumerate()) <= before
            assert repr(engine).endswith("closed>")
            mtrain.close_all()
    assert failed
    return found


def messages_of(groups: Groups, config: Config, names: Sequence[str]) -> list[str]:
    """Returns the error message of each mistake; one engine makes them all and stays usable after each."""
    with free(groups), Engine(config) as engine:
        return [_message_of(engine, name) for name in names]


def _message_of(engine: Engine, name: str) -> str:
    try:
        MISTAKES[name](engine)
    except (MtrainError, RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = ""
    if name == "a second call" and message == "":
        assert engine.optim_step().denominator == 2
    elif name != "closed":
        engine.forward_backward([Datum([1, 2, 3])])
        assert engine.optim_step().denominator == 2, f"of the batch after the mistake alone: {name}"
    return message


def _second_engine(engine: Engine) -> None:
    Engine(engine.config)


def _closed(engine: Engine) -> None:
    engine.close()
    engine.forward_backward([Datum([1, 2])])


def _twice(engine: Engine) -> None:
    engine.forward_backward([Datum([1, 2])])
    engine.forward_backward([Datum([1, 2])])


def _another(config: Any) -> None:
    Engine(config)


def _no_prompts(engine: Engine) -> None:
    if engine.generate([]):
        raise RuntimeError("answers to nothing")


def _mean(inputs: TermInputs) -> Any:
    return inputs.logits.cross_entropy(inputs.labels).mean()


def _not_finite(engine: Engine) -> None:
    engine.forward_backward(
        [Datum([1, 2])], lambda inputs: weigh(inputs.logits.cross_entropy(inputs.labels) / 0, inputs)
    )
    engine.optim_step()


MISTAKES = {
    "empty": lambda engine: engine.forward_backward([]),
    "nothing to look at": lambda engine: engine.forward([]),
    "nothing to score": lambda engine: engine.scores([]),
    "nothing to evaluate": lambda engine: engine.evaluate([]),
    "empty batches": lambda engine: engine.evaluate(iter([[], []])),
    "nothing to answer": _no_prompts,
    "no tokens": lambda engine: engine.forward_backward([Datum([1, 2]), Datum([])]),
    "too long": lambda engine: engine.forward_backward([Datum(range(34))]),
    "unknown id": lambda engine: engine.forward([Datum([1, 97])]),
    "weights": lambda engine: engine.forward_backward([Datum([1, 2, 3], weights=[1.0, 1.0])]),
    "a float": lambda engine: engine.forward_backward([Datum([1, 2]), Datum([1, 2.9])]),  # type: ignore[list-item]
    "a prompt of floats": lambda engine: engine.generate([[1], [1.7]]),
    "an empty prompt": lambda engine: engine.generate([[]]),
    "no batch": lambda engine: engine.forward_backward(None),
    "a datum alone": lambda engine: engine.forward(Datum([1, 2])),
    "a batch that runs out": lambda engine: engine.forward_backward(iter([Datum([1, 2])])),
    "rows without Datum": lambda engine: engine.forward_backward([Datum([1]), [1, 2]]),
    "one batch of evaluate": lambda engine: engine.evaluate([Datum([1, 2])]),
    "no batches": lambda engine: engine.evaluate(5),
    "a text": lambda engine: engine.forward([Datum("ab")]),  # type: ignore[arg-type]
    "a boolean": lambda engine: engine.forward([Datum([1, True])]),
    "a number for ids": lambda engine: engine.forward([Datum(5)]),  # type: ignore[arg-type]
    "texts as weights": lambda engine: engine.forward_backward([Datum([1, 2], weights=["a", "b"])]),  # type: ignore[list-item]
    "extras in a list": lambda engine: engine.forward_backward([Datum([1, 2], extras=[1.0])]),  # type: ignore[arg-type]
    "a member in a mapping": lambda engine: engine.forward([Datum([1, 2], member={"group": 0})]),  # type: ignore[arg-type]
    "prompts of text": lambda engine: engine.generate("Hello"),
    "one prompt": lambda engine: engine.generate([1, 2]),
    "no list of prompts": lambda engine: engine.generate(None),
    "sampling in a mapping": lambda engine: engine.generate([[1]], {"top_p": 0.9}),
    "half a sequence": lambda engine: engine.generate([[1]], max_sequences=0.5),
    "a configuration as text": lambda engine: _another("run.yaml"),
    "negative": lambda engine: engine.evaluate([[Datum([1, 2], weight=-1.0)]]),
    "unknown loss": lambda engine: engine.forward_backward([Datum([1, 2])], "ppoo"),
    "unknown option": lambda engine: engine.evaluate([[Datum([1, 2])]], NAMED, {"pover": 2}),
    "no temperature": lambda engine: engine.forward_backward([Datum([1, 2])], "entropy", {"temperature": -1}),
    "a correction without a bound": lambda engine: engine.forward_backward(
        [Datum([1, 2])], "ppo", {"rollout_correction": "token-mask"}
    ),
    "options of a function": lambda engine: engine.forward_backward([Datum([1, 2])], squared, {"power": 2}),
    "not a pair": lambda engine: engine.forward_backward([Datum([1, 2])], _mean),
    "nothing to step": lambda engine: engine.optim_step(),
    "second engine": _second_engine,
    "closed": _closed,
    "a second call": _twice,
    "not finite": _not_finite,
}
