"""What a service's ranks do together: each operation of a client, on one engine that all models share in turns.

Every rank gets the same operations in the same order, so each knows every model; only the first rank answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.api.engine import Engine
from mtrain.api.turns import Held
from mtrain.arch.adapters import all_matrices
from mtrain.base.errors import ConfigError, DataError, MachineError, MtrainError, NumericError, RunFolderError
from mtrain.config import Config
from mtrain.config.schema.adapter import GROUPS, AdapterSection, LoraSection, Target
from mtrain.config.schema.model import ModelSection
from mtrain.convert.adapters import export_adapter
from mtrain.core.engine.optimizer import AdamOptions
from mtrain.core.ranks.init import on_first_rank
from mtrain.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from mtrain.serve.likeliest import ends_with, likeliest_of_prompt, log_probs_of_prompt
from mtrain.serve.losses import Batch
from mtrain.serve.operations import (
    CreateModel,
    Done,
    Failed,
    KeepSampler,
    LoadWeights,
    Operation,
    OptimStep,
    Refuse,
    Sample,
    Save,
    Unload,
)
from mtrain.serve.protocol import SentBatch, written_answers, written_outputs
from mtrain.serve.room import Sizes, check_room, sequences_at_once
from mtrain.serve.store import Described, Kind, Lora, Place, Store
from mtrain.training.export import export_whole, exported_through_checkpoint

_ALPHA = 32.0
"""Numerator of the adapters' scale if the configuration gives none, the same for every rank."""
_TYPES: Mapping[Kind, str] = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
_TARGETS: Mapping[str, tuple[Target, ...]] = {
    "train_attn": ("qkv", "proj", "in_proj", "out_proj"),
    "train_mlp": ("fc1", "fc2", "experts"),
    "train_unembed": ("output",),
}


def _named(lora: Lora) -> list[Target]:
    return [each for option, targets in _TARGETS.items() if getattr(lora, option) for each in targets]


def _targets(lora: Lora, model: ModelSection) -> list[Target]:
    """Returns the modules that a client names, as far as the model has them."""
    named = _named(lora)
    every = LoraSection(targets=tuple(named or ("qkv",)))
    there = {each.part for each in all_matrices(model, every)}
    return [each for each in named if there.intersection(GROUPS.get(each, (each,)))]


def _longest_side(model: ModelSection, targets: list[Target]) -> int:
    matrices = all_matrices(model, LoraSection(targets=tuple(targets)))
    return max(max(each.rows, each.columns) for each in matrices)


@dataclass(frozen=True)
class Served:
    """The model that a service offers."""

    config: Config
    """Configuration, whose adapter section gives the scale of adapters."""

    @property
    def name(self) -> str:
        """Returns the name that clients use."""
        return Path(self.config.run.dir if self.config.model.hf is None else self.config.model.hf).name

    @property
    def tokenizer(self) -> Path | None:
        """Returns the path of the tokenizer, for texts that end an answer; None if no key names one."""
        if self.config.data.tokenizer is not None:
            return Path(self.config.data.tokenizer)
        hf = self.config.model.hf
        has_one = hf is not None and any(list(Path(hf).glob(each)) for each in ("tokenizer.json", "*.model"))
        return Path(hf) if hf is not None and has_one else None

    def adapted(self, lora: Lora) -> Config:
        """Returns the configuration with a client's adapter; with `adapter.path` that of the folder.

        Raises:
            ConfigError: The model cannot have such an adapter, or models start from one of another shape.
        """
        content, config, start = self.config.model_dump(), self.config, self.config.adapter
        if start is not None and start.path is not None:
            named = _named(lora)
            if lora.rank != start.rank or not start.parts.issubset(p for t in named for p in GROUPS.get(t, (t,))):
                raise ConfigError(
                    f"rank={lora.rank} on {', '.join(named) or 'nothing'} was asked for, but models of this service "
                    f"start from {_shown(start)} (adapter.path); ask for that rank, and for these modules at least"
                )
            return config
        if lora.rank == 0:
            content["adapter"] = None
            return Config.model_validate(content)
        targets = _targets(lora, config.model)
        if not targets:
            raise ConfigError("nothing of this model would learn; set train_attn or train_mlp, or for the whole rank=0")
        most = _longest_side(config.model, targets)
        if lora.rank > most:
            raise ConfigError(
                f"rank={lora.rank} is larger than each of the matrices that it would adapt; take at most {most}"
            )
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
class _Kept:
    """Weights that are sampled from."""

    engine: Engine
    held: Held


@dataclass
class _Model:
    lora: Lora
    engine: Engine
    """Engine for adapters of this shape, shared with others in turns."""
    held: Held | None = None
    """State while another model is on the engine."""
    fault: str | None = None
    """Error since the last step, whose gradient is incomplete."""
    has_gradients: bool = False
    """Whether there was a forward_backward since the last step."""


class Worker:
    """The models of a service on this rank."""

    def __init__(self, served: Served, store: Store) -> None:
        self._served, self._store = served, store
        self._engine = Engine(served.config)
        self._shapes: dict[str, Engine] = {}
        """Engines for adapters of other shapes on the same base, by their section as JSON."""
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, _Kept | None] = {}
        self._current: dict[int, str] = {}
        """Engine id -> the model on it."""
        self._base = self._held_base()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        assert self._served.tokenizer is not None, "the application refuses texts that nobody can compare"
        return load_tokenizer(self._served.tokenizer)

    def close(self) -> None:
        self._engine.close()

    def run(self, operation: Operation) -> Done | Failed:
        """Runs a client's operation. Collective.

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
        if isinstance(operation, SentBatch | Refuse) and operation.is_of_step and operation.model_id in self._models:
            self._models[operation.model_id].fault = failed.message
            engine = self._models[operation.model_id].engine
            if self._current.get(id(engine)) == operation.model_id:
                engine.drop_gradients()
        return failed

    def _done(self, operation: Operation) -> Done:
        match operation:
            case CreateModel():
                return self._create(operation)
            case LoadWeights():
                model = self._turn_to(operation.model_id)
                model.has_gradients = False
                self._load(model.engine, operation.source, operation.with_optimizer)
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
            case Refuse():
                raise DataError(operation.message)
            case Unload():
                return self._unload(operation)

    def _create(self, asked: CreateModel) -> Done:
        if asked.model_id in self._models:
            raise DataError(f"{asked.model_id} exists already; create a model of another number")
        engine = self._engine_of(asked.lora)
        if id(engine) in self._current:  # the model whose turn it is will wait in host memory
            check_room(engine.device, 0, Sizes(engine.config).trained_bytes, "another model")
        self._leave(engine)
        engine.begin_anew(asked.lora.seed)
        self._models[asked.model_id] = _Model(asked.lora, engine)
        self._current[id(engine)] = asked.model_id
        if asked.source is None:
            return Done({"model_id": asked.model_id, "type": "create_model"})
        try:
            self._load(engine, asked.source, asked.with_optimizer)
        except MtrainError:
            del self._models[asked.model_id]
            del self._current[id(engine)]
            self._free_shapes()
            raise
        return Done({"path": str(asked.source), "model_id": asked.model_id, "type": "load_weights"})

    def _engine_of(self, lora: Lora) -> Engine:
        """Returns an engine for adapters of this shape, existing or new, on the same base."""
        config = self._served.adapted(lora)
        there, wanted = self._engine.config.adapter, config.adapter
        if wanted == there:
            return self._engine
        if there is None or wanted is None or config.train.compile != "none":
            return self._built_anew(lora)
        shape = wanted.model_dump_json()
        if shape not in self._shapes:
            check_room(self._engine.device, Sizes(config).trained_bytes, 0, f"an adapter of rank {lora.rank}")
            self._shapes[shape] = self._engine.adapter(shape, wanted.model_dump(exclude={"path"}))
        return self._shapes[shape]

    def _built_anew(self, lora: Lora) -> Engine:
        """Closes all engines, and builds one for adapters after a whole model was trained, or the reverse."""
        config = self._served.adapted(lora)
        there, wanted = self._engine.config.adapter, config.adapter
        if self._models:
            raise ConfigError(
                f"this service holds models with {_shown(there)}, and one with {_shown(wanted)} was asked for, which "
                "cannot be trained at the same time; close the sessions of the others first"
            )
        more = Sizes(config).trained_bytes - Sizes(self._engine.config).trained_bytes
        check_room(self._engine.device, max(0, more), 0, f"a model with {_shown(wanted)}")
        self._engine.close()
        self._shapes.clear()
        self._current.clear()
        # held adapters have another shape
        self._samplers = {each: kept for each, kept in self._samplers.items() if kept is None}
        self._engine = Engine(config)
        self._base = self._held_base()
        return self._engine

    def _free_shapes(self) -> None:
        """Closes the engines of adapters that nobody uses."""
        used = {id(each.engine) for each in (*self._models.values(), *self._samplers.values()) if each is not None}
        for shape, engine in list(self._shapes.items()):
            if id(engine) not in used:
                self._current.pop(id(engine), None)
                self._shapes.pop(shape).close()

    @contextmanager
    def _reading(self, source: Place) -> Iterator[Described]:
        """Keeps clients from removing a checkpoint inside the `with` block. Collective."""
        with ExitStack() as held:
            yield on_first_rank(lambda: held.enter_context(self._store.reading(source)))

    def _load(self, engine: Engine, source: Place, with_optimizer: bool) -> None:
        with self._reading(source):
            engine.load(self._store.folder(source))
        if not with_optimizer:
            engine.forget_optimizer()

    def _pass(self, sent: SentBatch) -> Done:
        model = self._turn_to(sent.model_id)
        batch = Batch.of(sent.data, sent.loss, sent.options, self._served.config.model.vocab_size)
        if sent.forward_only:
            model.engine.evaluate([batch.data], batch.function)
        else:
            if model.fault is not None:
                raise DataError(f"an earlier forward_backward of this step failed ({model.fault}); make a new step")
            model.engine.forward_backward(batch.data, batch.function)
            model.has_gradients = True
        log_probs, loss = batch.outputs(model.engine.device)
        return Done(written_outputs({"logprobs": log_probs}, {"loss:sum": loss}))

    def _step(self, asked: OptimStep) -> Done:
        model = self._turn_to(asked.model_id)
        fault, model.fault = model.fault, None
        if fault is not None:
            model.engine.drop_gradients()
            model.has_gradients = False
            raise DataError(f"a forward_backward of this step failed ({fault}), so no update was made; send it again")
        if not model.has_gradients:
            raise DataError("optim_step needs a forward_backward before it; send one")
        options = AdamOptions(**asked.options)
        options.check_rate(asked.lr)  # gradients stay, for a step with other options
        model.has_gradients = False
        done = model.engine.optim_step(asked.lr, options)
        return Done({"metrics": {"grad_norm": done.grad_norm, "step": float(done.step)}})

    def _save(self, asked: Save) -> Done:
        model = self._turn_to(asked.place.model_id)
        place, store = asked.place, self._store

        def begun() -> Any:
            if not asked.overwrite and not store.is_free(place):
                raise DataError(f"{place} exists already; take another name, or overwrite=True")
            return store.fresh(place)

        # gradients of an unfinished step are not part of a checkpoint
        folder: Path = on_first_rank(begun)
        if place.kind == "external_weights":
            convert = partial(export_adapter, dtype=None) if model.lora.rank else export_whole
            exported_through_checkpoint(folder, model.engine.save, convert)
        else:
            model.engine.save(folder)
        lora, now = vars(model.lora) if model.lora.rank else None, store.clock()
        described = Described(
            place.model_id,
            place.kind,
            place.name,
            self._served.name,
            lora,
            now,
            asked.user_metadata,
            None if asked.ttl_seconds is None else now + asked.ttl_seconds,
            asked.run_metadata,
        )
        on_first_rank(lambda: store.publish(described, place))
        return Done({"path": str(place), "type": _TYPES[place.kind]})

    def _keep(self, asked: KeepSampler) -> Done:
        if asked.model_id is not None:
            engine = self._turn_to(asked.model_id).engine
            check_room(engine.device, 0, Sizes(engine.config).weights_bytes, "one more sampler")
            self._samplers[asked.sampler_id] = _Kept(engine, engine.hold(weights_only=True))
        elif asked.source is not None:
            self._samplers[asked.sampler_id] = self._weights_of(asked.source)
        else:
            self._samplers[asked.sampler_id] = None
        return Done({"sampling_session_id": asked.sampler_id, "type": "save_weights_for_sampler"})

    def _weights_of(self, source: Place) -> _Kept:
        with self._reading(source) as described:
            engine = self._engine_of(described.adapter)
            check_room(engine.device, 0, Sizes(engine.config).weights_bytes, "one more sampler")
            self._leave(engine)
            engine.load(self._store.folder(source))
        return _Kept(engine, engine.hold(weights_only=True))

    def _sample(self, asked: Sample) -> Done:
        if asked.sampler_id not in self._samplers:
            raise DataError(f"there is no sampling session {asked.sampler_id}; create one")
        kept = self._samplers[asked.sampler_id]
        engine = self._engine if kept is None else kept.engine
        self._leave(engine)
        if kept is not None:
            engine.put_back(kept.held)
        elif self._base is not None:
            engine.put_back(self._base)
        is_bare = kept is None and self._base is None
        with engine.adapters_off() if is_bare else nullcontext():
            ends = partial(ends_with, asked.stop_texts, self._tokenizer) if asked.stop_texts else None
            sampling = replace(asked.sampling, is_complete=ends, num_likeliest=asked.num_likeliest)
            length = len(asked.prompt) + sampling.max_new_tokens
            most = sequences_at_once(Sizes(engine.config), engine.device, length)
            found = engine.generate([asked.prompt] * asked.num_samples, sampling, most)
            likely = log_probs_of_prompt(engine, asked.prompt, asked.last_n) if asked.with_prompt_log_probs else None
            count = min(asked.num_likeliest_of_prompt, self._served.config.model.vocab_size)
            likeliest = likeliest_of_prompt(engine, asked.prompt, count, asked.last_n) if count else None
        return Done(written_answers(found, likely, likeliest))

    def _unload(self, asked: Unload) -> Done:
        for model_id in asked.model_ids:
            model = self._models.pop(model_id, None)
            if model is not None and self._current.get(id(model.engine)) == model_id:
                model.engine.drop_gradients()
                del self._current[id(model.engine)]
        for sampler_id in asked.sampler_ids:
            self._samplers.pop(sampler_id, None)
        self._free_shapes()
        return Done({"type": "unload_model"})

    def _turn_to(self, model_id: str) -> _Model:
        """Brings a model onto its engine."""
        model = self._models.get(model_id)
        if model is None:
            raise DataError(f"there is no model {model_id}; create one, or load a checkpoint of it")
        if self._current.get(id(model.engine)) != model_id:
            self._leave(model.engine)
            assert model.held is not None, "a model that is not on its engine is held"
            model.engine.put_back(model.held)
            model.held, self._current[id(model.engine)] = None, model_id
        return model

    def _leave(self, engine: Engine) -> None:
        """Saves the state of the model on an engine, so that others can use it."""
        current = self._current.pop(id(engine), None)
        if current is not None:
            self._models[current].held = engine.hold()

    def _held_base(self) -> Held | None:
        """Returns what models start from beyond frozen weights: the whole model, or adapter.path."""
        adapter = self._engine.config.adapter
        return self._engine.hold(weights_only=True) if adapter is None or adapter.path is not None else None


def _shown(adapter: AdapterSection | None) -> str:
    return "no adapters" if adapter is None else f"adapters of rank {adapter.rank} on {', '.join(adapter.targets)}"
