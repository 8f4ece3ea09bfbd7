"""Runs the operations of clients on all ranks of a service, on one engine that all models share in turns.

Every rank gets the same operations in the same order, so each knows every model; only the first rank answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from mtrain.api.engine import Engine
from mtrain.api.turns import HeldState
from mtrain.base.errors import ConfigError, DataError, MachineError, MtrainError, NumericError, RunFolderError
from mtrain.convert.adapters import export_adapter
from mtrain.core.engine.optimizer import AdamOptions
from mtrain.core.ranks.init import on_first_rank
from mtrain.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from mtrain.serve import operations
from mtrain.serve.images import Interleaved, written_out
from mtrain.serve.losses import Batch, likeliest_of_prompt, log_probs_of_prompt
from mtrain.serve.operations import Done, Failed, Operation
from mtrain.serve.protocol import SentBatch, written_answers, written_outputs
from mtrain.serve.room import Sizes, check_room, sequences_at_once
from mtrain.serve.served import Served, shown
from mtrain.serve.store import Described, Store
from mtrain.training.export import export_whole, exported_through_checkpoint

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character; each byte can be a token."""


def ends_with(texts: Sequence[str], tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Says whether the latest tokens contain one of the texts; control tokens count as their names."""
    # enough for the longest text, and some more since the first token is decoded without its blank
    tail = ids[-_LONGEST_CHARACTER * (max(map(len, texts)) + 1) :]
    control, written = tokenizer.special_tokens(), ""
    run: list[int] = []
    for token in tail:
        name = tokenizer.name(token)
        if name in control:
            written, run = written + tokenizer.decode(run) + name, []
        else:
            run.append(token)
    written += tokenizer.decode(run)
    return any(text in written for text in texts)


@dataclass(frozen=True)
class _SampledWeights:
    """Weights that are sampled from."""

    engine: Engine
    state: HeldState


@dataclass
class _Model:
    lora: operations.Lora
    engine: Engine
    """Engine for adapters of this shape, shared with others in turns."""
    metadata: dict[str, str] | None
    """The client's metadata of the training run."""
    state: HeldState | None = None
    """State while another model is on the engine."""
    fault: str | None = None
    """Error of a forward_backward since the last step: the gradient is incomplete."""
    has_gradients: bool = False
    """Whether a forward_backward ran since the last step."""


class Worker:
    """The models of a service on this rank."""

    def __init__(self, served: Served, store: Store) -> None:
        self._served, self._store = served, store
        self._engine = Engine(served.config)
        self._shapes: dict[str, Engine] = {}
        """Engines for adapters of other shapes on the same base, by the JSON of their section."""
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, _SampledWeights | None] = {}
        self._current: dict[int, str] = {}
        """Engine id -> the model on it."""
        self._base = self._start_weights()
        if served.config.model.vision is not None:
            self._engine.images.load()  # a folder without an image processor ends the start instead of a call

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        assert self._served.tokenizer is not None, "the application refuses stop texts without a tokenizer"
        return load_tokenizer(self._served.tokenizer)

    def close(self) -> None:
        self._engine.close()

    def run(self, operation: Operation) -> Done | Failed:
        """Runs a client's operation; raises only if the ranks cannot continue. Collective."""
        try:
            return self._done(operation)
        except (DataError, ConfigError, NumericError, RunFolderError, ValueError) as error:
            failed = Failed(str(error), "user")
        except MachineError as error:
            if not error.on_every_rank:
                raise
            failed = Failed(str(error), "server")
        if (
            isinstance(operation, SentBatch | operations.Refuse)
            and operation.is_of_step
            and operation.model_id in self._models
        ):
            self._models[operation.model_id].fault = failed.message
            engine = self._models[operation.model_id].engine
            if self._current.get(id(engine)) == operation.model_id:
                engine.drop_gradients()
        return failed

    def _done(self, operation: Operation) -> Done:
        match operation:
            case operations.CreateModel():
                lora = operations.Lora(rank=0) if operation.lora_config is None else operation.lora_config
                self._create(operation.new_model_id, lora, operation.user_metadata)
                return Done({"model_id": operation.new_model_id, "type": operation.type})
            case operations.LoadWeights():
                return self._load_weights(operation)
            case SentBatch():
                return self._pass(operation)
            case operations.OptimStep():
                return self._step(operation)
            case operations.SaveForSampler(path=None):
                self._samplers[operation.sampler_id] = self._copied_weights(self._turn_to(operation.model_id).engine)
                return Done({"sampling_session_id": operation.sampler_id, "type": operation.type})
            case operations.Save():
                return self._save(operation)
            case operations.CreateSampler():
                self._samplers[operation.sampler_id] = self._weights_of(operation.model_path)
                return Done({"sampling_session_id": operation.sampler_id, "type": operation.type})
            case operations.Sample():
                return self._sample(operation)
            case operations.Refuse():
                raise DataError(operation.message)
            case operations.Unload():
                return self._unload(operation)

    def _create(self, model_id: str, lora: operations.Lora, metadata: dict[str, str] | None) -> Engine:
        if model_id in self._models:
            raise DataError(f"{model_id} already exists; create a model with another number")
        engine = self._engine_of(lora)
        if id(engine) in self._current:  # the model whose turn it is will wait in host memory
            check_room(engine.device, 0, Sizes(engine.config).trained_bytes, "another model")
        self._leave(engine)
        engine.begin_anew(lora.seed)
        self._models[model_id] = _Model(lora, engine, metadata)
        self._current[id(engine)] = model_id
        return engine

    def _load_weights(self, request: operations.LoadWeights) -> Done:
        model_id = request.model_id if request.new_model_id is None else request.new_model_id
        assert model_id is not None, "the body has one of the two"
        with self._reading(request.path) as described:
            if request.new_model_id is None:
                engine = self._turn_to(model_id).engine
                self._models[model_id].has_gradients = False
            else:
                engine = self._create(model_id, described.adapter, request.user_metadata)
            try:
                engine.load(self._store.folder(request.path))
            except MtrainError:
                if request.new_model_id is not None:
                    self._unload(operations.Unload((model_id,), ()))
                raise
        if not request.optimizer:
            engine.forget_optimizer()
        return Done({"path": str(request.path), "model_id": model_id, "type": request.type})

    def _engine_of(self, lora: operations.Lora) -> Engine:
        """Returns an engine for adapters of this shape, existing or new, on the same base."""
        config = self._served.adapted(lora)
        current, requested = self._engine.config.adapter, config.adapter
        if requested == current:
            return self._engine
        if current is None or requested is None or config.train.compile == "layers":
            return self._built_anew(lora)
        shape = requested.model_dump_json()
        if shape not in self._shapes:
            check_room(self._engine.device, Sizes(config).trained_bytes, 0, f"an adapter of rank {lora.rank}")
            self._shapes[shape] = self._engine.adapter(shape, requested.model_dump(exclude={"path"}))
        return self._shapes[shape]

    def _built_anew(self, lora: operations.Lora) -> Engine:
        """Closes all engines, and builds one for adapters instead of a whole model, or the reverse."""
        config = self._served.adapted(lora)
        current, requested = self._engine.config.adapter, config.adapter
        if self._models or any(weights is not None for weights in self._samplers.values()):
            raise ConfigError(
                f"this service holds models with {shown(current)}, and one with {shown(requested)} was requested, but "
                "they cannot be trained at the same time; close the other sessions first"
            )
        more = Sizes(config).trained_bytes - Sizes(self._engine.config).trained_bytes
        check_room(self._engine.device, max(0, more), 0, f"a model with {shown(requested)}")
        self._engine.close()
        self._shapes.clear()
        self._current.clear()
        self._engine = Engine(config)
        self._base = self._start_weights()
        return self._engine

    def _free_shapes(self) -> None:
        used = {id(user.engine) for user in (*self._models.values(), *self._samplers.values()) if user is not None}
        for shape, engine in list(self._shapes.items()):
            if id(engine) not in used:
                self._current.pop(id(engine), None)
                self._shapes.pop(shape).close()

    @contextmanager
    def _reading(self, source: operations.TinkerPath) -> Iterator[Described]:
        """Protects a checkpoint from removal inside the `with` block. Collective."""
        with ExitStack() as resources:
            yield on_first_rank(lambda: resources.enter_context(self._store.reading(source)))

    def _pass(self, sent: SentBatch) -> Done:
        model = self._turn_to(sent.model_id)
        parts = {f"datum {number}": Interleaved(each.tokens, each.images) for number, each in enumerate(sent.data)}
        tokens = written_out(parts, model.engine.images)
        data = [replace(datum, tokens=each) for datum, each in zip(sent.data, tokens, strict=True)]
        batch = Batch.of(data, sent.loss, sent.options, self._served.config.model.vocab_size)
        if sent.forward_only:
            model.engine.evaluate([batch.data], batch.function)
        else:
            if model.fault is not None:
                raise DataError(f"an earlier forward_backward of this step failed ({model.fault}); begin a new step")
            model.engine.forward_backward(batch.data, batch.function)
            model.has_gradients = True
        log_probs, loss = batch.outputs(model.engine.device)
        return Done(written_outputs({"logprobs": log_probs}, {"loss:sum": loss}))

    def _step(self, request: operations.OptimStep) -> Done:
        model = self._turn_to(request.model_id)
        fault, model.fault = model.fault, None
        if fault is not None:
            model.engine.drop_gradients()
            model.has_gradients = False
            raise DataError(f"a forward_backward of this step failed ({fault}), so no update was made; send it again")
        if not model.has_gradients:
            raise DataError("optim_step needs a forward_backward before it; send one")
        params = request.adam_params
        assert params is not None, "the body's validator refuses None"
        moments = params.model_dump(include={"beta1", "beta2", "eps", "weight_decay"})
        options = AdamOptions(**moments, clip_grad=max(0.0, params.grad_clip_norm))
        options.check_rate(params.learning_rate)  # before the step, so that the gradients survive a bad rate
        model.has_gradients = False
        done = model.engine.optim_step(params.learning_rate, options)
        return Done({"metrics": {"grad_norm": done.grad_norm, "step": float(done.step)}})

    def _save(self, request: operations.Save) -> Done:
        model, path, store = self._turn_to(request.model_id), request.tinker_path, self._store

        def begun() -> Path:
            if not request.overwrite and not store.is_free(path):
                raise DataError(f"{path} already exists; use another name, or overwrite=True")
            return store.fresh(path)

        # gradients of an unfinished step are not part of a checkpoint
        folder = on_first_rank(begun)
        if path.kind == "external_weights":
            convert = partial(export_adapter, dtype=None) if model.lora.rank else export_whole
            exported_through_checkpoint(folder, model.engine.save, convert)
        else:
            model.engine.save(folder)
        lora, now = model.lora.model_dump() if model.lora.rank else None, store.clock()
        ends = None if request.ttl_seconds is None else now + request.ttl_seconds
        what = (path.model_id, path.kind, path.name, self._served.name, lora)
        described = Described(*what, now, request.user_metadata, ends, model.metadata)
        on_first_rank(lambda: store.publish(described))
        return Done({"path": str(path), "type": request.type})

    def _copied_weights(self, engine: Engine, source: operations.TinkerPath | None = None) -> _SampledWeights:
        """Copies weights to sample from: an engine's current ones, or those of a checkpoint."""
        check_room(engine.device, 0, Sizes(engine.config).weights_bytes, "one more sampler")
        if source is not None:
            self._leave(engine)
            engine.load(self._store.folder(source))
        return _SampledWeights(engine, engine.hold(weights_only=True))

    def _weights_of(self, source: operations.TinkerPath | None) -> _SampledWeights | None:
        if source is None:
            return None
        with self._reading(source) as described:
            return self._copied_weights(self._engine_of(described.adapter), source)

    def _sample(self, request: operations.Sample) -> Done:
        body, sampling, texts = request
        if body.sampling_session_id not in self._samplers:
            raise DataError(f"there is no sampling session {body.sampling_session_id}; create one")
        sampled = self._samplers[body.sampling_session_id]
        engine = self._engine if sampled is None else sampled.engine
        state = self._base if sampled is None else sampled.state
        self._leave(engine)
        if state is not None:
            engine.put_back(state)
        with engine.adapters_off() if state is None else nullcontext():
            if texts:
                sampling = replace(sampling, is_complete=partial(ends_with, texts, self._tokenizer))
            parts, last_n = body.prompt.parts, body.prompt_logprobs_last_n
            prompt, images = written_out({"the prompt": parts}, engine.images)[0].tolist(), parts.contents
            sampling = replace(sampling, max_new_tokens=self._served.most_new_tokens(body, len(prompt)))
            most = sequences_at_once(Sizes(engine.config), engine.device, len(prompt) + sampling.max_new_tokens)
            given = [images] * body.num_samples if images else None
            answers = engine.generate([prompt] * body.num_samples, sampling, most, images=given)
            likely = log_probs_of_prompt(engine, prompt, images, last_n) if body.prompt_logprobs else None
            count = min(body.topk_prompt_logprobs, self._served.config.model.vocab_size)
            likeliest = likeliest_of_prompt(engine, prompt, images, count, last_n) if count else None
        return Done(written_answers(answers, likely, likeliest))

    def _unload(self, request: operations.Unload) -> Done:
        for model_id in request.model_ids:
            model = self._models.pop(model_id, None)
            if model is not None and self._current.get(id(model.engine)) == model_id:
                model.engine.drop_gradients()
                del self._current[id(model.engine)]
        for sampler_id in request.sampler_ids:
            self._samplers.pop(sampler_id, None)
        self._free_shapes()
        return Done({"type": "unload_model"})

    def _turn_to(self, model_id: str) -> _Model:
        model = self._models.get(model_id)
        if model is None:
            raise DataError(f"there is no model {model_id}; create one, or load a checkpoint of it")
        if self._current.get(id(model.engine)) != model_id:
            self._leave(model.engine)
            assert model.state is not None, "`_leave` saves the state of a model that is not on its engine"
            model.engine.put_back(model.state)
            model.state, self._current[id(model.engine)] = None, model_id
        return model

    def _leave(self, engine: Engine) -> None:
        current = self._current.pop(id(engine), None)
        if current is not None:
            self._models[current].state = engine.hold()

    def _start_weights(self) -> HeldState | None:
        """Returns the weights that models start from in addition to frozen ones: the whole model's, or the adapter of
        adapter.path; None for new adapters."""
        adapter = self._engine.config.adapter
        return self._engine.hold(weights_only=True) if adapter is None or adapter.path is not None else None
