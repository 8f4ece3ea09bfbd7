"""The Tinker protocol over HTTP, as an ASGI application on the first rank.

Calls that take time return the name of a future at once; `retrieve_future` waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field, replace

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mtrain.base.errors import DataError
from mtrain.serve import bodies
from mtrain.serve.asked import BaseModel, asked_of
from mtrain.serve.checkpoints import FILE, Checkpoints, Run
from mtrain.serve.desk import Desk, FullError, Request, Sessions
from mtrain.serve.http import Guard, Handler, call_of, fault, read_body, read_with, sentence_of
from mtrain.serve.operations import (
    CreateModel,
    Done,
    Failed,
    KeepSampler,
    LoadWeights,
    Operation,
    OptimStep,
    Refuse,
    Save,
    Unload,
)
from mtrain.serve.protocol import read_batch
from mtrain.serve.store import Lora, Place, Store

_POLL_S = 25.0
"""Longest wait for a future in one request, in seconds; the SDK gives up after 45 s."""


@dataclass
class App:
    """Handlers of the protocol, with the sessions and models of clients."""

    base: BaseModel
    desk: Desk
    sessions: Sessions
    store: Store
    token: str | None
    """Key that clients send; None: any."""
    _runs: dict[str, Run] = field(default_factory=dict)
    _samplers: dict[str, str | None] = field(default_factory=dict)
    """Path of each sampler's weights; None: the base model, or a sampler without a path."""

    def asgi(self) -> Starlette:
        posts: dict[str, Handler] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "create_model": self.create_model,
            "forward_backward": self._in_line(self.forward_backward, is_chunk=True),
            "optim_step": self._in_line(self.optim_step),
            "save_weights": self._in_line(self.save_weights),
            "save_weights_for_sampler": self._in_line(self.save_weights_for_sampler),
            "save_weights_external": self._in_line(self.save_weights_external),
            "load_weights": self._in_line(self.load_weights),
            "get_info": self.get_info,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
            "sessions/{session_id}/finish": self.finish_session,
        }
        gets = {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.get_sampler,
        }
        routes = [Route(f"/api/v1/{path}", self._guarded(each), methods=["POST"]) for path, each in posts.items()]
        routes += [Route(f"/api/v1/{path}", self._guarded(each), methods=["GET"]) for path, each in gets.items()]
        checkpoints = Checkpoints(self.base, self.store, self._runs)
        routes += [Route(path, self._guarded(each), methods=[method]) for method, path, each in checkpoints.calls()]
        # a signature in the address replaces the key
        routes.append(Route(FILE, self._guarded(checkpoints.file, is_signed=True)))
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        routes.append(Route("/{path:path}", self._guarded(self.unknown), methods=methods))
        return Starlette(routes=routes)

    def _guarded(self, handler: Handler, is_signed: bool = False) -> Handler:
        guard = Guard(self.token)

        async def guarded(request: HttpRequest) -> Response:
            try:
                guard.check(request, is_signed)
                return await handler(request)
            except HTTPException as error:
                return fault(error.status_code, error.detail)
            except ValidationError as error:
                return fault(422, sentence_of(error))
            except DataError as error:
                return fault(400, str(error))
            except FullError:
                return fault(429, "too many requests wait; send this one again later")
            except asyncio.CancelledError:  # by the server, which ends
                return fault(503, "the service ends; start it again")

        return guarded

    def _in_line(self, handler: Handler, is_chunk: bool = False) -> Handler:
        """Gives a refused call its turn among the calls of its model: the client has spent its number."""

        async def placed(request: HttpRequest) -> Response:
            try:
                return await handler(request)
            except (DataError, ValidationError, HTTPException) as error:
                if (call := await call_of(request)) is not None:
                    refuse = Refuse(call.model_id, sentence_of(error), call.is_of_step)
                    with contextlib.suppress(KeyError, DataError):  # no model, or no number that has a turn
                        made = self.desk.submit_in_order(refuse, call.model_id, call.number)
                        if is_chunk and isinstance(error, DataError):
                            return _future(made, call.model_id)
                raise

        return placed

    # the service

    async def healthz(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def telemetry(self, request: HttpRequest) -> Response:
        """Accepts a client's reports and drops them."""
        await read_with(request, len)
        return JSONResponse({"status": "accepted"})

    async def client_config(self, request: HttpRequest) -> Response:
        """Tells a client what the service understands."""
        await read_body(request, bodies.ClientBody)
        return JSONResponse({"proto_compress_fwdbwd": True, "parallel_fwdbwd_chunks": True})

    async def dynamic_config(self, request: HttpRequest) -> Response:
        await read_body(request, bodies.ClientBody)
        return JSONResponse({})

    async def capabilities(self, request: HttpRequest) -> Response:
        """Names the model."""
        model = {"model_name": self.base.name, "max_context_length": self.base.seq_length}
        return JSONResponse({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    async def unknown(self, request: HttpRequest) -> Response:
        """Refuses a call that the service does not have."""
        path = request.url.path[:200]
        return fault(404, f"{path} is no call of this service; docs/training/serve.md lists those it has")

    # sessions

    async def create_session(self, request: HttpRequest) -> Response:
        await read_body(request, bodies.SessionBody)
        session_id = secrets.token_hex(16)
        self.sessions.see(session_id)
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: HttpRequest) -> Response:
        body = await read_body(request, bodies.HeartbeatBody)
        self._check_session(body.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: HttpRequest) -> Response:
        """Closes a session with all its models."""
        session_id = request.path_params["session_id"]
        self._check_session(session_id)
        self.sessions.end(session_id)
        self.unload(session_id)
        return JSONResponse({})

    def unload(self, session_id: str) -> None:
        """Frees the models and samplers of a session."""
        models = tuple(each for each in self._runs if each.startswith(f"{session_id}:"))
        samplers = tuple(each for each in self._samplers if each.startswith(f"{session_id}:"))
        for each in models:
            del self._runs[each]
            self.desk.close_line(each)
        for each in samplers:
            del self._samplers[each]
        if models or samplers:
            self.desk.submit(Unload(models, samplers))

    # training

    async def create_model(self, request: HttpRequest) -> Response:
        body = await read_body(request, bodies.CreateModelBody)
        self._check_session(body.session_id)
        self.base.check_name(body.base_model)
        lora = Lora(0) if body.lora_config is None else Lora(**body.lora_config.model_dump())
        if lora.rank and lora.seed is None:
            lora = replace(lora, seed=secrets.randbits(48))
        if self.base.has_tied_output:
            lora = replace(lora, train_unembed=False)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        return self._began(model_id, CreateModel(model_id, lora), body.user_metadata)

    async def load_weights(self, request: HttpRequest) -> Response:
        """Continues from a checkpoint, with a new or an existing model."""
        body = await read_body(request, bodies.LoadBody)
        source = _loadable(body.path)
        if body.base_model is not None:
            self.base.check_name(body.base_model)
        described = await run_in_threadpool(self.store.described, source)
        of_new = body.session_id, body.model_seq_id
        if body.model_id is not None and body.seq_id is not None and of_new == (None, None):
            if body.user_metadata is not None:
                raise DataError("user_metadata belongs to a new model; give it to create_training_client_from_state")
            return self._ordered(LoadWeights(body.model_id, source, body.optimizer), body.model_id, body.seq_id)
        if None in of_new or body.session_id is None or (body.model_id, body.seq_id) != (None, None):
            raise DataError("load_weights needs model_id and seq_id, or session_id and model_seq_id; send one of both")
        self._check_session(body.session_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        operation = CreateModel(model_id, described.adapter, source, body.optimizer)
        return self._began(model_id, operation, body.user_metadata)

    def _began(self, model_id: str, operation: CreateModel, user_metadata: dict[str, str] | None) -> Response:
        request = self.desk.submit(operation, f"{model_id}:create")
        self.desk.open_line(model_id)
        self._runs.setdefault(model_id, Run(operation.lora, user_metadata))
        return _future(request, model_id)

    async def forward_backward(self, request: HttpRequest) -> Response:
        """Adds the gradient of a batch, or only computes its outputs."""
        sent = await read_with(request, read_batch)
        return self._ordered(sent, sent.model_id, sent.seq_id)

    async def optim_step(self, request: HttpRequest) -> Response:
        body = await read_body(request, bodies.OptimStepBody)
        if body.adam_params is None or body.optimizer_params is not None:
            raise DataError("optim_step needs adam_params; the optimizer of this service is AdamW")
        given = body.adam_params
        options = given.model_dump(include={"beta1", "beta2", "eps", "weight_decay"})
        options["clip_grad"] = max(0.0, given.grad_clip_norm)
        return self._ordered(OptimStep(body.model_id, given.learning_rate, options), body.model_id, body.seq_id)

    async def save_weights(self, request: HttpRequest) -> Response:
        """Saves weights and optimizer under a name."""
        body = await read_body(request, bodies.SaveBody)
        name = f"{body.seq_id:08d}" if body.path is None else body.path
        return self._saved(Place.of(body.model_id, "weights", name), body, body.overwrite, body.user_metadata)

    async def save_weights_external(self, request: HttpRequest) -> Response:
        """Saves weights for other programs: adapters as PEFT does, a whole model as transformers does."""
        body = await read_body(request, bodies.SaveExternalBody)
        if body.path is None:
            raise DataError("save_weights_external needs path; give a name")
        return self._saved(Place.of(body.model_id, "external_weights", body.path), body, True, None)

    def _saved(
        self, place: Place, body: bodies.NamedBody, overwrite: bool, user_metadata: dict[str, str] | None
    ) -> Response:
        run = self._runs.get(body.model_id)
        of_run = None if run is None else run.user_metadata
        operation = Save(place, overwrite, body.ttl_seconds, user_metadata, of_run)
        request = self._submitted(operation, body.model_id, body.seq_id)
        if body.ttl_seconds is not None and not self.desk.listen(request, self.store.look_again):
            self.store.look_again()
        return _future(request, body.model_id)

    async def save_weights_for_sampler(self, request: HttpRequest) -> Response:
        """Saves weights to sample from, under a name or for this session only."""
        body = await read_body(request, bodies.SaveSamplerBody)
        if body.kind == "inflight":
            raise DataError("kind=inflight is not offered here; take snapshot, of which a client makes one per step")
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise DataError("save_weights_for_sampler needs path or sampling_session_seq_id; send one of both")
        if body.path is not None:
            place = Place.of(body.model_id, "sampler_weights", body.path)
            return self._saved(place, body, True, body.user_metadata)
        if body.ttl_seconds is not None or body.user_metadata is not None:
            raise DataError("ttl_seconds and user_metadata belong to a checkpoint; give path, or leave them out")
        sampler_id = f"{body.model_id.partition(':')[0]}:sample:{body.sampling_session_seq_id}"
        answer = self._ordered(KeepSampler(sampler_id, body.model_id), body.model_id, body.seq_id)
        self._samplers[sampler_id] = None
        return answer

    async def get_info(self, request: HttpRequest) -> Response:
        body = await read_body(request, bodies.InfoBody)
        if body.model_id not in self._runs:
            raise HTTPException(404, f"there is no model {body.model_id}; create one")
        lora = self._runs[body.model_id].lora
        names = {"model_name": self.base.name, "tokenizer_id": self.base.name}
        is_lora = {"is_lora": lora.rank > 0, "lora_rank": lora.rank or None}
        return JSONResponse(
            {"type": "get_info", "model_data": names, "model_id": body.model_id, "model_name": self.base.name} | is_lora
        )

    def _ordered(self, operation: Operation, model_id: str, number: int) -> Response:
        return _future(self._submitted(operation, model_id, number), model_id)

    def _submitted(self, operation: Operation, model_id: str, number: int) -> Request:
        if not self.desk.has_line(model_id):
            raise HTTPException(404, f"there is no model {model_id[:200]}; create one, or load a checkpoint")
        if number < 1:
            raise DataError(f"seq_id={number} is not offered: calls of a model are counted from 1")
        try:
            return self.desk.submit_in_order(operation, model_id, number)
        except KeyError:
            raise HTTPException(410, f"the turn of call {number} of {model_id} is over and its result gone") from None

    # sampling

    async def create_sampling_session(self, request: HttpRequest) -> Response:
        """Makes weights ready to sample from."""
        body = await read_body(request, bodies.SamplingSessionBody)
        self._check_session(body.session_id)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        source = None if body.model_path is None else _loadable(body.model_path)
        if source is None or body.base_model is not None:
            self.base.check_name("" if body.base_model is None else body.base_model)
        made = self.desk.submit(KeepSampler(sampler_id, source=source), f"{sampler_id}:create")
        # before it is made, so that a session that ends meanwhile frees it
        self._samplers[sampler_id] = body.model_path
        result = await self._result_of(made, None)
        if isinstance(result, Failed):
            self._samplers.pop(sampler_id, None)
            raise DataError(result.message)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def get_sampler(self, request: HttpRequest) -> Response:
        sampler_id = request.path_params["sampler_id"]
        if sampler_id not in self._samplers:
            raise HTTPException(404, f"there is no sampling session {sampler_id[:200]}; create one")
        path = self._samplers[sampler_id]
        return JSONResponse({"sampler_id": sampler_id, "base_model": self.base.name, "model_path": path})

    async def asample(self, request: HttpRequest) -> Response:
        """Draws answers to a prompt."""
        body = await read_body(request, bodies.SampleBody)
        if body.sampling_session_id not in self._samplers:
            raise HTTPException(404, f"there is no sampling session {body.sampling_session_id}; create one")
        asked = asked_of(body, self.base)
        made = self.desk.submit(asked, f"{body.sampling_session_id}:{body.seq_id}")
        ids = [f"{made.id}:{number}" for number in range(body.num_samples)]
        return JSONResponse({"request_id": made.id, "sample_sequence_ids": ids})

    # futures

    async def retrieve_future(self, request: HttpRequest) -> Response:
        """Waits up to _POLL_S for a result."""
        body = await read_body(request, bodies.RetrieveBody)
        found = self.desk.find(body.request_id)
        if found is None:
            raise HTTPException(410, f"there is no request {body.request_id}; its result is forgotten, or never was")
        result = await self._result_of(found, _POLL_S)
        match result:
            case None:
                return JSONResponse({"type": "try_again", "request_id": found.id, "queue_state": "active"})
            case Failed():
                return JSONResponse({"error": result.message, "category": result.category})
            case Done(content=bytes() as content):
                return Response(content, media_type="application/x-protobuf")
            case Done(content=content):
                return JSONResponse(content)

    async def _result_of(self, request: Request, timeout_s: float | None) -> Done | Failed | None:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        if self.desk.listen(request, lambda: loop.call_soon_threadsafe(there.set)):
            try:
                await asyncio.wait_for(there.wait(), timeout_s)
            except TimeoutError:
                return None
        return request.result

    def _check_session(self, session_id: str) -> None:
        if not self.sessions.has(session_id):
            raise HTTPException(404, f"there is no session {session_id[:200]}; make a new ServiceClient")
        self.sessions.see(session_id)


def _loadable(path: str) -> Place:
    place = Place.parsed(path)
    if place.kind == "external_weights":
        raise DataError(f"{place} is of a form for other programs; name a checkpoint of weights or sampler_weights")
    return place


def _future(request: Request, model_id: str) -> Response:
    return JSONResponse({"request_id": request.id, "model_id": model_id})
