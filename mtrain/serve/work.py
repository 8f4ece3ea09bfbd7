"""What a service's ranks do together: each operation of a client, on one engine that all models take turns on.

Every rank is given the same operations in the same order, so each knows of every model; the first rank alone answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from mtrain.base.errors import ConfigError, DataError, MachineError, MtrainError, NumericError, RunFolderError
from mtrain.config import Config
from mtrain.config.schema.adapter import GROUPS, AdapterSection, LoraSection, Target
from mtrain.config.schema.model import ModelSection
from mtrain.data.datum import Datum
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.mcore.engine.optimizer import AdamOptions
from mtrain.plan.adapters import all_matrices
from mtrain.serve.likeliest import ends_with, likeliest_of_prompt
from mtrain.serve.losses import Batch
from mtrain.serve.protocol import NO_LOG_PROB, Likeliest, SentBatch, written_answers, written_outputs
from mtrain.serve.store import Described, Lora, Place, Store
from mtrain.tokenizer import Tokenizer, load_tokenizer
from mtrain.training.engine import Engine
from mtrain.training.held import Held
from mtrain.training.sampling.choice import SamplingParams

_ALPHA = 32.0
"""Numerator of the scale of adapters where the configuration gives none, the same for every rank."""


_TARGETS: Mapping[str, tuple[Target, ...]] = {
    "train_attn": ("qkv", "proj", "in_proj", "out_proj"),
    "train_mlp": ("fc1", "fc2", "experts"),
    "train_unembed": ("output",),
}


def _targets(lora: Lora, model: ModelSection) -> list[Target]:
    """Returns the modules that a client names, as far as the model has them."""
    named = [each for option, targets in _TARGETS.items() if getattr(lora, option) for each in targets]
    every = LoraSection(targets=tuple(named or ("qkv",)))
    there = {each.part for each in all_matrices(model, every)}
    return [each for each in named if there.intersection(GROUPS.get(each, (each,)))]


@dataclass(frozen=True)
class Served:
    """The model that a service offers."""

    config: Config
    """Configuration; its adapter section gives the scale of adapters."""

    @property
    def name(self) -> str:
        """Returns the name that clients call the model by."""
        return Path(self.config.run.dir if self.config.model.hf is None else self.config.model.hf).name

    @property
    def tokenizer(self) -> Path | None:
        """Returns the path of the tokenizer, for texts that end an answer; None where no key names one."""
        if self.config.data.tokenizer is not None:
            return Path(self.config.data.tokenizer)
        hf = self.config.model.hf
        has_one = hf is not None and any(list(Path(hf).glob(each)) for each in ("tokenizer.json", "*.model"))
        return Path(hf) if hf is not None and has_one else None

    def adapted(self, lora: Lora) -> Config:
        """Returns the configuration with the adapter that a client asks for.

        Raises:
            ConfigError: The model cannot have such an adapter.
        """
        content, config = self.config.model_dump(), self.config
        if lora.rank == 0:
            content["adapter"] = None
            return Config.model_validate(content)
        targets = _targets(lora, config.model)
        if not targets:
            raise ConfigError("nothing of this model would learn; set train_attn or train_mlp, or for the whole rank=0")
        given = {"kind": "lora", "alpha": _ALPHA} if config.adapter is None else config.adapter.model_dump()
        content["adapter"] = {**given, "rank": lora.rank, "targets": targets, "rank_pattern": {}, "alpha_pattern": {}}
        try:
            return Config.model_validate(content)
        except ValidationError as fault:
            reasons = "; ".join(each["msg"].removeprefix("Value error, ") for each in fault.errors())
            raise ConfigError(
                f"this model cannot have an adapter of rank {lora.rank} on {', '.join(targets)}: {reasons}"
            ) from None


@dataclass(frozen=True)
class CreateModel:
    """A new model at its beginning, or from a checkpoint."""

    model_id: str
    lora: Lora
    source: Place | None = None
    with_optimizer: bool = False


@dataclass(frozen=True)
class LoadWeights:
    """A model goes on from a checkpoint."""

    model_id: str
    source: Place
    with_optimizer: bool


@dataclass(frozen=True)
class OptimStep:
    """One update."""

    model_id: str
    lr: float
    options: AdamOptions


@dataclass(frozen=True)
class Save:
    """A checkpoint by name."""

    place: Place
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class KeepSampler:
    """Weights to sample from: those of a model now, of a checkpoint, or of the base model."""

    sampler_id: str
    model_id: str | None = None
    source: Place | None = None


@dataclass(frozen=True)
class Sample:
    """Answers to one prompt."""

    sampler_id: str
    prompt: list[int]
    num_samples: int
    sampling: SamplingParams
    stop_texts: tuple[str, ...] = ()
    num_likeliest: int = 0
    """Number of likeliest tokens in the place of each token of an answer."""
    with_prompt_log_probs: bool = False
    num_likeliest_of_prompt: int = 0
    last_n: int | None = None
    """Number of the prompt's last tokens that are asked for; None: all."""


@dataclass(frozen=True)
class Unload:
    """Models and samplers that nobody uses any more."""

    model_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]


Operation = CreateModel | LoadWeights | OptimStep | Save | KeepSampler | Sample | Unload | SentBatch


@dataclass(frozen=True)
class Done:
    """Answer to an operation."""

    content: bytes | dict[str, Any]
    """Protobuf, or JSON."""


@dataclass(frozen=True)
class Failed:
    """An operation that changed nothing, and why."""

    message: str
    category: Literal["user", "server"]


@dataclass
class _Model:
    lora: Lora
    held: Held | None = None
    """State while another model is on the engine."""
    fault: str | None = None
    """Error since the last step: its gradient is not whole."""
    has_gradients: bool = False
    """Whether there was a forward_backward since the last step."""


class Worker:
    """The models of a service on this rank."""

    def __init__(self, served: Served, store: Store) -> None:
        """Builds the engine.

        Args:
            served: The model.
            store: Folder of the checkpoints.
        """
        self._served, self._store = served, store
        self._engine = Engine(served.config)
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, Held | None] = {}
        self._current: str | None = None
        self._base = self._whole_base()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        assert self._served.tokenizer is not None, "the application refuses texts that nobody can compare"
        return load_tokenizer(self._served.tokenizer)

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()

    def run(self, operation: Operation) -> Done | Failed:
        """Does what a client asks for. Collective.

        Raises:
            MtrainError: The ranks cannot go on.
        """
        try:
            return self._done(operation)
        except (DataError, ConfigError, NumericError, RunFolderError, ValueError) as error:
            failed = Failed(str(error), "user")
        except MachineError as error:
            if not error.on_every_rank:
                raise
            failed = Failed(str(error), "server")
        if isinstance(operation, SentBatch) and operation.model_id in self._models and not operation.forward_only:
            self._models[operation.model_id].fault = failed.message
            if self._current == operation.model_id:
                self._engine.drop_gradients()
        return failed

    def _done(self, operation: Operation) -> Done:
        match operation:
            case CreateModel():
                return self._create(operation)
            case LoadWeights():
                self._turn_to(operation.model_id).has_gradients = False
                self._load(operation.source, operation.with_optimizer)
                return Done({"path": str(operation.source), "model_id": operation.model_id, "type": "load_weights"})
            case SentBatch():
                return self._pass(operation)
            case OptimStep():
                return self._step(operation)
            case Save():
                return self._save(operation)
            case KeepSampler():
                return self._keep(operation)
            case Sample():
                return self._sample(operation)
            case Unload():
                return self._unload(operation)

    def _create(self, asked: CreateModel) -> Done:
        if asked.model_id in self._models:
            raise DataError(f"{asked.model_id} exists already; create a model of another number")
        self._fit(asked.lora)
        self._leave()
        self._engine.begin_anew(asked.lora.seed)
        self._models[asked.model_id] = _Model(asked.lora)
        self._current = asked.model_id
        if asked.source is None:
            return Done({"model_id": asked.model_id, "type": "create_model"})
        try:
            self._load(asked.source, asked.with_optimizer)
        except MtrainError:
            del self._models[asked.model_id]
            self._current = None
            raise
        return Done({"path": str(asked.source), "model_id": asked.model_id, "type": "load_weights"})

    def _fit(self, lora: Lora) -> None:
        """Builds the engine anew where adapters of another shape are wanted.

        Raises:
            ConfigError: There are models whose adapters have another shape, or the model can have no such adapter.
        """
        config = self._served.adapted(lora)
        there, wanted = self._engine.config.adapter, config.adapter
        if wanted == there:
            return
        if self._models:
            raise ConfigError(
                f"this service holds models with {_shown(there)}, and one with {_shown(wanted)} was asked for; take "
                "the same rank and modules, or close the sessions of the others first"
            )
        self._engine.close()
        # what is held of adapters has another shape
        self._samplers = {each: held for each, held in self._samplers.items() if held is None}
        self._engine = Engine(config)
        self._base = self._whole_base()

    def _load(self, source: Place, with_optimizer: bool) -> None:
        on_first_rank(lambda: self._store.described(source))
        self._engine.load(self._store.folder(source))
        if not with_optimizer:
            self._engine.forget_optimizer()

    def _pass(self, sent: SentBatch) -> Done:
        model = self._turn_to(sent.model_id)
        batch = Batch.of(sent.data, sent.loss, sent.options, self._served.config.model.vocab_size)
        if sent.forward_only:
            self._engine.evaluate([batch.data], batch.function)
        else:
            if model.fault is not None:
                raise DataError(f"an earlier forward_backward of this step failed ({model.fault}); make a new step")
            self._engine.forward_backward(batch.data, batch.function)
            model.has_gradients = True
        log_probs, loss = batch.outputs(self._engine.device)
        return Done(written_outputs({"logprobs": log_probs}, {"loss:sum": loss}))

    def _step(self, asked: OptimStep) -> Done:
        model = self._turn_to(asked.model_id)
        fault, model.fault = model.fault, None
        if fault is not None:
            self._engine.drop_gradients()
            model.has_gradients = False
            raise DataError(f"a forward_backward of this step failed ({fault}), so no update was made; send it again")
        if not model.has_gradients:
            raise DataError("optim_step needs a forward_backward before it; send one")
        model.has_gradients = False
        done = self._engine.optim_step(asked.lr, asked.options)
        return Done({"metrics": {"grad_norm": done.grad_norm, "step": float(done.step)}})

    def _save(self, asked: Save) -> Done:
        model = self._turn_to(asked.place.model_id)
        place, store = asked.place, self._store

        def begun() -> Any:
            if store.folder(place).exists() and not asked.overwrite:
                raise DataError(f"{place} exists already; take another name, or overwrite=True")
            return store.fresh(place)

        # gradients of an unfinished step are not part of a checkpoint
        self._engine.save(on_first_rank(begun))
        lora = vars(model.lora) if model.lora.rank else None
        described = Described(
            place.model_id, place.kind, place.name, self._served.name, lora, time.time(), asked.user_metadata
        )
        on_first_rank(lambda: store.publish(described, place))
        kind = "save_weights" if place.kind == "weights" else "save_weights_for_sampler"
        return Done({"path": str(place), "type": kind})

    def _keep(self, asked: KeepSampler) -> Done:
        if asked.model_id is not None:
            self._turn_to(asked.model_id)
            self._samplers[asked.sampler_id] = self._engine.hold(weights_only=True)
        elif asked.source is not None:
            self._samplers[asked.sampler_id] = self._weights_of(asked.source)
        else:
            self._samplers[asked.sampler_id] = None
        return Done({"sampling_session_id": asked.sampler_id, "type": "save_weights_for_sampler"})

    def _weights_of(self, source: Place) -> Held:
        described = on_first_rank(lambda: self._store.described(source))
        self._fit(described.adapter)
        self._leave()
        self._engine.load(self._store.folder(source))
        return self._engine.hold(weights_only=True)

    def _sample(self, asked: Sample) -> Done:
        if asked.sampler_id not in self._samplers:
            raise DataError(f"there is no sampling session {asked.sampler_id}; create one")
        held = self._samplers[asked.sampler_id]
        self._leave()
        if held is not None:
            self._engine.put_back(held)
        elif self._base is not None:
            self._engine.put_back(self._base)
        is_bare = held is None and self._engine.config.adapter is not None
        with self._engine.adapters_off() if is_bare else nullcontext():
            ends = partial(ends_with, asked.stop_texts, self._tokenizer) if asked.stop_texts else None
            sampling = replace(asked.sampling, is_complete=ends, num_likeliest=asked.num_likeliest)
            found = self._engine.generate([asked.prompt] * asked.num_samples, sampling)
            likely = self._prompt_log_probs(asked) if asked.with_prompt_log_probs else None
            likeliest = self._prompt_likeliest(asked) if asked.num_likeliest_of_prompt else None
        return Done(written_answers(found, likely, likeliest))

    def _prompt_log_probs(self, asked: Sample) -> np.ndarray[Any, np.dtype[np.float32]]:
        found = np.full(len(asked.prompt), np.nan, np.float32)
        if len(asked.prompt) > 1:
            found[1:] = self._engine.forward([Datum(asked.prompt)]).log_probs[0].numpy()
        if asked.last_n is not None:
            found[: len(found) - asked.last_n] = np.nan
        return found

    def _prompt_likeliest(self, asked: Sample) -> Likeliest:
        count = min(asked.num_likeliest_of_prompt, self._served.config.model.vocab_size)
        ids = np.zeros((len(asked.prompt), count), np.int32)
        log_probs = np.full(ids.shape, NO_LOG_PROB, np.float32)
        if len(asked.prompt) > 1:
            ids[1:], log_probs[1:] = likeliest_of_prompt(self._engine, asked.prompt, count)
        unasked = slice(0, 0 if asked.last_n is None else len(ids) - asked.last_n)
        ids[unasked], log_probs[unasked] = 0, NO_LOG_PROB
        return ids, log_probs

    def _unload(self, asked: Unload) -> Done:
        for model_id in asked.model_ids:
            self._models.pop(model_id, None)
            if self._current == model_id:
                self._engine.drop_gradients()
                self._current = None
        for sampler_id in asked.sampler_ids:
            self._samplers.pop(sampler_id, None)
        return Done({"type": "unload_model"})

    def _turn_to(self, model_id: str) -> _Model:
        """Brings a model onto the engine."""
        model = self._models.get(model_id)
        if model is None:
            raise DataError(f"there is no model {model_id}; create one, or load a checkpoint of it")
        if self._current != model_id:
            self._leave()
            assert model.held is not None, "a model that is not on the engine is held"
            self._engine.put_back(model.held)
            model.held, self._current = None, model_id
        return model

    def _leave(self) -> None:
        """Holds the model that is on the engine, so that others can use it."""
        if self._current is not None:
            self._models[self._current].held = self._engine.hold()
            self._current = None

    def _whole_base(self) -> Held | None:
        """Returns the weights of the base model, where models have nothing of it left: they are trained whole."""
        return self._engine.hold(weights_only=True) if self._engine.config.adapter is None else None


def _shown(adapter: AdapterSection | None) -> str:
    return "no adapters" if adapter is None else f"adapters of rank {adapter.rank} on {', '.join(adapter.targets)}"
