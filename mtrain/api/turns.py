"""Models that share one frozen base in turns: adapters by name, and saved states."""

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from pydantic import ValidationError
from torch import Tensor

from mtrain.arch.adapters import keys_of_full_training
from mtrain.base.errors import ConfigError
from mtrain.checkpoint.state.base import settle_magnitudes
from mtrain.checkpoint.state.held import (
    HeldOptimizer,
    HeldWeights,
    clear_optimizer,
    held_gradients,
    held_optimizer,
    held_weights,
    put_back_gradients,
    put_back_optimizer,
    put_back_weights,
)
from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection, AnyAdapter
from mtrain.config.schema.model import ModelSection
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_adapters
from mtrain.core.layers.adapters.adapter import AdapterSet, adapters_off
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import draw_adapters
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import OpenStep, TrainingStep
from mtrain.hf.schema.peft import with_fused_targets
from mtrain.training.build import BuiltStep
from mtrain.training.resume import initialize, load_base, load_start_adapter


class HeldState(NamedTuple):
    """Copy of this rank's part of the state that training changes, from `Engine.hold`."""

    weights: HeldWeights
    optimizer: HeldOptimizer | None = None
    """None if only weights were copied."""
    step: int = 0
    total_tokens: int = 0
    open_step: OpenStep | None = None
    """Unfinished step; None without gradients since the last one."""
    gradients: Sequence[Tensor] = ()
    tokens: int = 0
    """Number of tokens of the unfinished step."""


class SharedBase:
    """Chunks of a frozen model, which hold one of several sets of adapters at a time."""

    def __init__(self, first: BuiltStep) -> None:
        self._sets = {id(first): AdapterSet(map(unwrap, first.model.chunks))}
        self.names: dict[str, BuiltStep] = {}
        """Further sets by name."""
        self._current: BuiltStep | None = first
        self.is_closed = False
        """Whether the engine that built the model was closed."""

    def add(self, name: str, adapter: AnyAdapter, objective: Objective) -> BuiltStep:
        """Builds adapters with an optimizer, and installs them; does not draw their weights. Collective."""
        first = self._current
        assert first is not None, "the caller has called `put_in`"
        self._take_out()
        config = first.model.config.model_copy(update={"adapter": adapter})
        sharded = build_adapters(first.model.chunks, config, first.model.groups)
        model = RankModel(config, first.model.groups, sharded, Optimizer(config, sharded, first.model.groups))
        made = BuiltStep(model, first.teacher, TrainingStep(model, objective, first.teacher))
        self._sets[id(made)] = AdapterSet(map(unwrap, model.chunks))
        self.names[name], self._current = made, made
        return made

    def put_in(self, built: BuiltStep) -> BuiltStep:
        if self._current is not built:
            self._take_out()
            self._sets[id(built)].put_in()
            built.training.routers.watch()
            self._current = built
        return built

    def remove(self, name: str) -> None:
        if self.is_closed:
            return
        gone = self.names.pop(name)
        if self._current is gone:
            self._take_out()
        self._sets.pop(id(gone)).unhook()
        gone.model.sharded.release()

    def close(self) -> None:
        self.is_closed, self._current = True, None
        self.names.clear()
        self._sets.clear()

    def _take_out(self) -> None:
        if self._current is not None:
            # hooks that wait for gathered parameters are also on the modules of the base
            self._current.model.sharded.gather_parameters()
            self._sets[id(self._current)].take_out()
            self._current = None


class Turns:
    """Trained state of an engine, with the methods by which several models take turns; the base class of `Engine`."""

    config: Config
    step: int = 0
    """Number of completed updates."""
    _groups: Groups
    _objective: Objective
    _resources: contextlib.ExitStack
    _built_step: BuiltStep | None = None
    _base: SharedBase | None = None
    _open: OpenStep | None = None
    _tokens: int = 0
    _total_tokens: int = 0
    _is_bare: bool = False

    def adapter(self, name: str, section: Mapping[str, Any] | None = None, seed: int | None = None) -> Self:
        """Adds an adapter to the frozen model, with its own optimizer, gradients and step.

        Calls of several adapters, including the engine's original one, may be mixed in any order: each trains bit for
        bit as it does alone. All share the frozen weights; until its `close` an adapter needs memory for its
        parameters, gradients and optimizer state, as `mtrain check` reports.

        Args:
            name: Unique name of the adapter.
            section: Keys of `adapter.*` that differ from the configuration's, such as rank, alpha and targets.
            seed: Seed of the initial weights; None: `train.seed`.

        Returns:
            Engine of this adapter, with all methods of `Engine`. Its `close` frees only the adapter; the `close` of the
            original engine frees everything.

        Raises:
            ConfigError: The name is in use, the model has no frozen base, or it cannot have such an adapter.
        """
        self._built()
        adapter, base = self.config.adapter, self._base
        if adapter is None or base is None or self.config.model.output.is_new:
            raise ConfigError(
                "several adapters need a frozen model, but the configuration "
                + ("trains all of it" if adapter is None else "has a head, which is trained in full")
                + "; add an adapter section, and remove model.num_labels"
            )
        if self.config.train.compile == "layers":
            raise ConfigError(
                "several adapters do not work with train.compile=layers, whose graphs may be bound to a single "
                "adapter; set train.compile=regions"
            )
        if name in base.names:
            raise ConfigError(f"an adapter {name!r} exists already; use another name, or close that one first")
        # without its path, from which only the configuration's adapter starts
        new_adapter = self._checked_adapter({**adapter.model_dump(exclude={"path"}), **(section or {})})
        model = self.config.model
        if keys := [*keys_of_full_training(model, adapter), *keys_of_full_training(model, new_adapter)]:
            raise ConfigError(
                f"several adapters share a frozen model, but {', '.join(dict.fromkeys(keys))} trains a part of it; "
                "remove it"
            )
        other = copy.copy(self)
        other._built_step = base.add(name, new_adapter, self._objective)
        other.config = other._built_step.model.config
        other._is_bare, other._resources = False, contextlib.ExitStack()
        other._resources.callback(base.remove, name)
        other.begin_anew(seed)
        return other

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Turns the adapters off inside the `with` block: `forward` and `evaluate` use the frozen model alone.

        This gives log-probabilities of the model that a finetuning with new adapters started from, without a second
        model in memory. A run that continues from `adapter.path` started from that adapter: its reference is the result
        of `forward` or `scores` before the first `optim_step`.

        Raises:
            ConfigError: The configuration has no `adapter`, or a part of the model is trained as a whole.
            RuntimeError: `forward_backward` was called inside the block, where nothing is trained.
        """
        _check_adapters_off(self.config.adapter, self.config.model)
        with adapters_off(self._built().model.chunks):
            self._is_bare = True
            try:
                yield
            finally:
                self._is_bare = False

    def hold(self, weights_only: bool = False) -> HeldState:
        """Copies the trained state to host memory: weights (with adapters, only these), optimizer, step and gradients.

        Args:
            weights_only: Whether to copy only the compute weights, which are enough to sample from.
        """
        model = self._built().model
        weights = held_weights(model)
        if weights_only:
            return HeldState(weights)
        state = HeldState(weights, held_optimizer(model), self.step, self._total_tokens)
        if self._open is None:
            return state
        return state._replace(open_step=self._open, gradients=held_gradients(model), tokens=self._tokens)

    def put_back(self, state: HeldState) -> None:
        """Restores a state of `hold`; if it has only weights, the engine can then evaluate and sample, not train."""
        model = self._built().model
        put_back_weights(state.weights, model)
        if state.optimizer is None:
            return
        put_back_optimizer(state.optimizer, model)
        self.step, self._total_tokens = state.step, state.total_tokens
        self._open, self._tokens = None, 0
        if state.open_step is not None:
            put_back_gradients(list(state.gradients), model)
            self._open, self._tokens = state.open_step, state.tokens

    def begin_anew(self, seed: int | None = None) -> None:
        """Resets weights and optimizer to step 0: new adapters, or the weights that the engine began with.

        Args:
            seed: Seed of the adapters; None: `train.seed`. With `adapter.path` they are loaded from the folder again.
        """
        model = self._built().model
        if self.config.adapter is None:
            initialize(model)
        else:
            seed = self.config.train.seed if seed is None else seed
            if keys_of_full_training(self.config.model, self.config.adapter):
                load_base(model)
            for chunk in model.chunks:
                draw_adapters(unwrap(chunk), self.config.model, self._groups, seed)
            model.optimizer.take_weights()
            settle_magnitudes(model)
            load_start_adapter(model)
        self.forget_optimizer()

    def forget_optimizer(self) -> None:
        """Resets moments, step and gradients to 0; keeps the weights."""
        clear_optimizer(self._built().model)
        self.drop_gradients()
        self.step = self._total_tokens = 0

    def drop_gradients(self) -> None:
        """Drops the gradients since the last step."""
        self._open, self._tokens = None, 0

    def close(self) -> None:
        """Frees the model and closes what the engine has opened. May be called twice."""
        self._let_go()
        self._resources.close()

    def _let_go(self) -> None:
        open_engines.discard(self)
        if self._built_step is not None:
            self._built_step.model.sharded.release()
        self._open = self._built_step = None

    def _built(self) -> BuiltStep:
        if self._built_step is None or (self._base is not None and self._base.is_closed):
            raise RuntimeError("this Engine is closed; create another one")
        return self._built_step if self._base is None else self._base.put_in(self._built_step)

    def _checked_adapter(self, section: Mapping[str, Any]) -> AnyAdapter:
        try:
            content = {**self.config.model_dump(), "adapter": dict(section)}
            adapter = Config.model_validate(with_fused_targets(content)).adapter
        except ValidationError as fault:
            broken = [(".".join(map(str, error["loc"])), error["msg"]) for error in fault.errors()]
            texts = [(where, reason.removeprefix("Value error, ")) for where, reason in broken]
            reasons = "; ".join(f"{where}: {reason}" if where else reason for where, reason in texts)
            raise ConfigError(f"this model cannot have such an adapter: {reasons}; change its section") from None
        assert adapter is not None, "the content has the section"
        return adapter


def _check_adapters_off(adapter: AdapterSection | None, model: ModelSection) -> None:
    """Refuses passes of the frozen model without adapters, or with a head or table that is trained as a whole."""
    if adapter is None:
        raise ConfigError(
            "adapters_off needs a model with adapters, but the configuration has no adapter section; train one "
            "(docs/training/lora.md), or compute reference log-probabilities with forward before the first optim_step"
        )
    if model.output.is_new:
        raise ConfigError(
            f"adapters_off restores the model that finetuning began from, but the head of {model.output} is trained in "
            "full, so the original is gone; compute scores before the first optim_step"
        )
    if keys := keys_of_full_training(model, adapter):
        raise ConfigError(
            f"adapters_off restores the model that finetuning began from, but with {', '.join(keys)} a part is trained "
            "in full, so the original is gone; compute scores before the first optim_step"
        )


open_engines: weakref.WeakSet[Turns] = weakref.WeakSet()
"""Engines with resources; an engine that nothing refers to any more frees them itself."""


def close_all() -> None:
    """Closes every engine of this process, as after a failed cell of a notebook, so that a new one can start.

    Frees models, process groups and threads. With several ranks, all of them must call it.
    """
    for engine in list(open_engines):
        engine.close()
