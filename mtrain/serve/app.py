"""Tinker's HTTP protocol, as an ASGI application on the first rank.

Slow calls return the id of a future immediately; `retrieve_future` waits for its result.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mtrain.base.errors import DataError
from mtrain.serve import operations
from mtrain.serve.checkpoints import FILE, Checkpoints, Run
from mtrain.serve.desk import Desk, FullError, Request
from mtrain.serve.http import B, Handler, call_of, check_access, fault, read_body, read_with, sentence_of
from mtrain.serve.operations import Done, Failed
from mtrain.serve.protocol import SentBatch, read_batch
from mtrain.serve.served import Served
from mtrain.serve.store import Store

_POLL_S = 25.0
"""Longest wait for a future in one request, in seconds; the SDK gives up after 45 s."""


@dataclass
class App:
    """Handlers of the protocol, with the sessions and models of clients."""

    base: Served
    desk: Desk
    store: Store
    token: str | None
    """Key that clients send; None: any."""
    sessions: dict[str, float] = field(default_factory=dict)
    """Connected clients, with the `time.monotonic` of their latest heartbeat."""
    _runs: dict[str, Run] = field(default_factory=dict)
    _samplers: dict[str, str | None] = field(default_factory=dict)
    """Path of each sampler's weights; None for the base model, and for samplers without a path."""

    def asgi(self) -> Starlette:
        posts: dict[str, Handler] = {
            "client/config": _reading(operations.ClientBody, self.client_config),
            "client/dynamic_config": _reading(operations.ClientBody, self.dynamic_config),
            "telemetry": self.telemetry,
            "create_session": _reading(operations.SessionBody, self.create_session),
            "session_heartbeat": _reading(operations.HeartbeatBody, self.heartbeat),
            "create_model": _reading(operations.CreateModel, self.create_model),
            "forward_backward": self._in_line(self.forward_backward, is_chunk=True),
            "optim_step": self._in_line(_reading(operations.OptimStep, self.ordered)),
            "save_weights": self._in_line(_reading(operations.SaveWeights, self.ordered)),
            "save_weights_for_sampler": self._in_line(_reading(operations.SaveForSampler, self.ordered)),
            "save_weights_external": self._in_line(_reading(operations.SaveExternal, self.ordered)),
            "load_weights": self._in_line(_reading(operations.LoadWeights, self.load_weights)),
            "get_info": _reading(operations.InfoBody, self.get_info),
            "create_sampling_session": _reading(operations.CreateSampler, self.create_sampling_session),
            "asample": _reading(operations.SampleBody, self.asample),
            "retrieve_future": _reading(operations.RetrieveBody, self.retrieve_future),
            "sessions/{session_id}/finish": self.finish_session,
        }
        gets = {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.get_sampler,
        }
        routes = [Route(f"/api/v1/{path}", self._guarded(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(f"/api/v1/{path}", self._guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        checkpoints = Checkpoints(self.base, self.store, self._runs)
        routes += [Route(path, self._guarded(call), methods=[method]) for method, path, call in checkpoints.calls()]
        routes.append(Route(FILE, self._guarded(checkpoints.file, is_signed=True)))
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        routes.append(Route("/{path:path}", self._guarded(self.unknown), methods=methods))
        return Starlette(routes=routes)

    def _guarded(self, handler: Handler, is_signed: bool = False) -> Handler:
        async def guarded(request: HttpRequest) -> Response:
            try:
                check_access(request, self.token, is_signed)
                return await handler(request)
            except HTTPException as error:
                return fault(error.status_code, error.detail)
            except ValidationError as error:
                return fault(422, sentence_of(error))
            except DataError as error:
                return fault(400, str(error))
            except FullError:
                return fault(429, "too many requests are waiting; send this one again later")
            except asyncio.CancelledError:  # by the server, which is shutting down
                return fault(503, "the service is shutting down; start it again")

        return guarded

    def _in_line(self, handler: Handler, is_chunk: bool = False) -> Handler:
        """Lets a refused call take its turn among the calls of its model, since the client has used up its number."""

        async def placed(request: HttpRequest) -> Response:
            try:
                return await handler(request)
            except (DataError, ValidationError, HTTPException) as error:
                if (call := await call_of(request)) is not None:
                    refuse = operations.Refuse(call.model_id, sentence_of(error), call.is_of_step)
                    with contextlib.suppress(KeyError, DataError):  # unknown model, or a number without a turn
                        made = self.desk.submit_in_order(refuse, call.model_id, call.number)
                        if is_chunk and isinstance(error, DataError):
                            return _future(made, call.model_id)
                raise

        return placed

    # the service

    async def healthz(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def telemetry(self, request: HttpRequest) -> Response:
        """Accepts a client's telemetry and discards it."""
        await read_with(request, len)
        return JSONResponse({"status": "accepted"})

    async def client_config(self, body: operations.ClientBody) -> Response:
        """Returns the features that the service supports."""
        return JSONResponse({"proto_compress_fwdbwd": True, "parallel_fwdbwd_chunks": True})

    async def dynamic_config(self, body: operations.ClientBody) -> Response:
        return JSONResponse({})

    async def capabilities(self, request: HttpRequest) -> Response:
        """Names the model."""
        model = {"model_name": self.base.name, "max_context_length": self.base.config.data.seq_length}
        return JSONResponse({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    async def unknown(self, request: HttpRequest) -> Response:
        """Refuses an unknown call."""
        path = request.url.path[:200]
        return fault(404, f"{path} is not a call of this service; docs/training/serve.md lists its calls")

    # sessions

    async def create_session(self, body: operations.SessionBody) -> Response:
        session_id = secrets.token_hex(16)
        self.sessions[session_id] = time.monotonic()
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, body: operations.HeartbeatBody) -> Response:
        self._check_session(body.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: HttpRequest) -> Response:
        """Closes a session with all its models."""
        session_id = request.path_params["session_id"]
        self._check_session(session_id)
        self.end(session_id)
        return JSONResponse({})

    def end(self, session_id: str) -> None:
        """Ends a session, and frees its models and samplers."""
        del self.sessions[session_id]
        models = tuple(run_id for run_id in self._runs if run_id.startswith(f"{session_id}:"))
        samplers = tuple(sampler_id for sampler_id in self._samplers if sampler_id.startswith(f"{session_id}:"))
        for run_id in models:
            del self._runs[run_id]
            self.desk.close_line(run_id)
        for sampler_id in samplers:
            del self._samplers[sampler_id]
        if models or samplers:
            self.desk.submit(operations.Unload(models, samplers))

    # training

    async def create_model(self, body: operations.CreateModel) -> Response:
        self._check_session(body.session_id)
        self.base.check_name(body.base_model)
        body.lora_config = self.base.completed_adapter(body.lora_config)
        return self._begin_model(body, body.new_model_id, body.lora_config)

    async def load_weights(self, body: operations.LoadWeights) -> Response:
        """Continues from a checkpoint, with a new or an existing model."""
        if body.base_model is not None:
            self.base.check_name(body.base_model)
        described = await run_in_threadpool(self.store.described, body.path)
        if body.session_id is None or body.new_model_id is None:
            return await self.ordered(body)
        self._check_session(body.session_id)
        return self._begin_model(body, body.new_model_id, described.adapter)

    def _begin_model(
        self, operation: operations.CreateModel | operations.LoadWeights, model_id: str, lora: operations.Lora
    ) -> Response:
        request = self.desk.submit(operation, f"{model_id}:create")
        self.desk.open_line(model_id)
        self._runs.setdefault(model_id, Run(lora, operation.user_metadata))
        return _future(request, model_id)

    async def forward_backward(self, request: HttpRequest) -> Response:
        """Adds the gradient of a batch, or only computes its outputs."""
        return await self.ordered(await read_with(request, read_batch))

    async def get_info(self, body: operations.InfoBody) -> Response:
        if body.model_id not in self._runs:
            raise HTTPException(404, f"there is no model {body.model_id}; create one")
        names = {"model_name": self.base.name, "tokenizer_id": self.base.name}
        known = {"type": "get_info", "model_data": names, "model_id": body.model_id, "model_name": self.base.name}
        return JSONResponse(known | self._runs[body.model_id].lora.facts)

    async def ordered(
        self, operation: SentBatch | operations.LoadWeights | operations.OptimStep | operations.Save
    ) -> Response:
        """Queues a numbered call of a model."""
        model_id, number = operation.model_id, operation.seq_id
        if model_id is None or number is None or not self.desk.has_line(model_id):
            raise HTTPException(404, f"there is no model {str(model_id)[:200]}; create one, or load a checkpoint")
        if number < 1:
            raise DataError(f"seq_id={number} is out of range; number the calls of a model from 1")
        try:
            request = self.desk.submit_in_order(operation, model_id, number)
        except KeyError:
            raise HTTPException(
                410, f"call {number} of {model_id} has had its turn, and its result was dropped; send a new call"
            ) from None
        if isinstance(operation, operations.SaveForSampler) and operation.path is None:
            self._samplers[operation.sampler_id] = None
        return _future(request, model_id)

    # sampling

    async def create_sampling_session(self, body: operations.CreateSampler) -> Response:
        """Makes weights ready to sample from."""
        self._check_session(body.session_id)
        if body.model_path is None or body.base_model is not None:
            self.base.check_name("" if body.base_model is None else body.base_model)
        sampler_id, path = body.sampler_id, body.model_path
        made = self.desk.submit(body, f"{sampler_id}:create")
        # before it exists, so that a session that ends meanwhile frees it
        self._samplers[sampler_id] = None if path is None else str(path)
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

    async def asample(self, body: operations.SampleBody) -> Response:
        """Draws answers to a prompt."""
        if body.sampling_session_id not in self._samplers:
            raise HTTPException(404, f"there is no sampling session {body.sampling_session_id}; create one")
        made = self.desk.submit(self.base.sample(body), f"{body.sampling_session_id}:{body.seq_id}")
        ids = [f"{made.id}:{number}" for number in range(body.num_samples)]
        return JSONResponse({"request_id": made.id, "sample_sequence_ids": ids})

    # futures

    async def retrieve_future(self, body: operations.RetrieveBody) -> Response:
        """Waits up to _POLL_S for a result."""
        request = self.desk.find(body.request_id)
        if request is None:
            raise HTTPException(
                410, f"there is no request {body.request_id}; its result was dropped, or it never existed"
            )
        result = await self._result_of(request, _POLL_S)
        match result:
            case None:
                return JSONResponse({"type": "try_again", "request_id": request.id, "queue_state": "active"})
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
        if session_id not in self.sessions:
            raise HTTPException(404, f"there is no session {session_id[:200]}; make a new ServiceClient")
        self.sessions[session_id] = time.monotonic()


def _reading(kind: type[B], answer: Callable[[B], Awaitable[Response]]) -> Handler:
    """Returns a handler that parses the body as `kind` and passes it to `answer`."""

    async def handler(request: HttpRequest) -> Response:
        return await answer(await read_body(request, kind))

    return handler


def _future(request: Request, model_id: str) -> Response:
    return JSONResponse({"request_id": request.id, "model_id": model_id})
