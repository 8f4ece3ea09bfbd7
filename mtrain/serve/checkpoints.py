"""Calls that concern checkpoints, on the first rank: lists, lifetimes, removal and download."""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from mtrain.base.errors import DataError
from mtrain.serve.http import Handler, fault, read_body
from mtrain.serve.operations import Kind, Lora, OfPath, TinkerPath, TtlBody
from mtrain.serve.served import Served
from mtrain.serve.store import Described, Store

FILE = "/api/v1/files/{model_id}/{kind}/{name}/{file:path}"
"""Address of a checkpoint's file, with `expires` and `signature` in the query."""
_RUNS = "/api/v1/training_runs"
_ONE = f"{_RUNS}/{{model_id}}/checkpoints/{{kind}}/{{name}}"
_LINK_S = 3600
"""Validity of a file's address, in seconds."""
_TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@dataclass(frozen=True)
class Run:
    """A model that clients train."""

    lora: Lora
    user_metadata: dict[str, str] | None


@dataclass
class Checkpoints:
    """Handlers of the protocol for checkpoints and training runs."""

    base: Served
    store: Store
    live: Mapping[str, Run]
    """Current models by name."""
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Signs the addresses of files, which are invalid after a restart."""

    def calls(self) -> Iterator[tuple[str, str, Handler]]:
        """Yields method, path and handler of each call."""
        yield "POST", "/api/v1/weights_info", self.weights_info
        yield "GET", "/api/v1/checkpoints", self.checkpoints
        yield "GET", _RUNS, self.training_runs
        yield "GET", f"{_RUNS}/{{model_id}}", self.training_run
        yield "GET", f"{_RUNS}/{{model_id}}/checkpoints", self.checkpoints_of
        yield "DELETE", _ONE, self.remove
        yield "PUT", f"{_ONE}/ttl", self.set_lifetime
        yield "GET", f"{_ONE}/external_weights_urls", self.addresses
        yield "POST", f"{_ONE}/publish", self.publish
        yield "DELETE", f"{_ONE}/publish", self.publish

    async def weights_info(self, request: Request) -> Response:
        body = await read_body(request, OfPath)
        described = await run_in_threadpool(self.store.described, body.tinker_path)
        lora = described.adapter
        trained = lora.model_dump(include={"train_unembed", "train_mlp", "train_attn"}) if lora.rank else {}
        return JSONResponse({"base_model": described.base_model} | lora.facts | trained)

    async def checkpoints(self, request: Request) -> Response:
        rows = [_shown(described) for described in await run_in_threadpool(self.store.all)]
        page, cursor = _page(rows, request)
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def checkpoints_of(self, request: Request) -> Response:
        saved = await run_in_threadpool(self.store.all)
        model_id = request.path_params["model_id"]
        return JSONResponse({"checkpoints": [_shown(item) for item in saved if item.model_id == model_id]})

    async def training_runs(self, request: Request) -> Response:
        """Lists the training runs that have checkpoints or are in progress."""
        runs = self._runs(await run_in_threadpool(self.store.all))
        page, cursor = _page(list(runs.values()), request)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        run = self._runs(await run_in_threadpool(self.store.all)).get(model_id)
        if run is None:
            raise HTTPException(404, f"there is no training run {model_id[:200]}; list them, and name one of them")
        return JSONResponse(run)

    def _runs(self, saved: list[Described]) -> dict[str, dict[str, Any]]:
        runs: dict[str, dict[str, Any]] = {}
        live = [(model_id, run, None) for model_id, run in self.live.items()]
        past = [(item.model_id, Run(item.adapter, _texts(item.run_metadata)), item) for item in saved]
        for model_id, run, described in [*live, *past]:
            shown = runs.setdefault(
                model_id,
                {
                    "training_run_id": model_id,
                    "base_model": self.base.name,
                    "model_owner": "local",
                    "last_request_time": _time(0 if described is None else described.time),
                    "user_metadata": run.user_metadata,
                }
                | run.lora.facts,
            )
            if described is not None and described.kind != "external_weights":
                key = "last_checkpoint" if described.kind == "weights" else "last_sampler_checkpoint"
                shown.setdefault(key, _shown(described))  # the newest comes first
        return runs

    async def remove(self, request: Request) -> Response:
        await run_in_threadpool(self.store.remove, _path_of(request))
        return Response(status_code=204)

    async def set_lifetime(self, request: Request) -> Response:
        """Sets when a checkpoint expires, or that it never does."""
        body = await read_body(request, TtlBody)
        await run_in_threadpool(self.store.set_lifetime, _path_of(request), body.ttl_seconds)
        return Response(status_code=204)

    async def publish(self, request: Request) -> Response:
        """Refuses to publish a checkpoint: only clients with the key may see it."""
        raise DataError("publish is not offered here; everyone who has the key of this service sees its checkpoints")

    async def addresses(self, request: Request) -> Response:
        """Returns an address for each exported file, which needs no key for an hour."""
        path = _path_of(request)
        if path.kind != "external_weights":
            raise DataError(f"{path} does not hold external_weights; call save_weights_external, and download those")
        files = await run_in_threadpool(self.store.files, path)
        expires = int(time.time()) + _LINK_S
        start = f"{request.base_url}api/v1/files/{path.model_id}/{path.kind}/{path.name}"
        urls = {
            file: f"{start}/{quote(file)}?expires={expires}&signature={self._signature(path, file, str(expires))}"
            for file in files
        }
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    async def file(self, request: Request) -> Response:
        """Sends an exported file; the signed address replaces the key."""
        path, file = _path_of(request), request.path_params["file"]
        expires, signature = (request.query_params.get(key, "") for key in ("expires", "signature"))
        is_ours = hmac.compare_digest(signature.encode(), self._signature(path, file, expires).encode())
        if not is_ours or int(expires) < time.time():
            return fault(403, "this address is not valid, or has expired; request the addresses again")
        if file not in await run_in_threadpool(self.store.files, path):
            return fault(404, f"{path} has no file {file}")
        return FileResponse(self.store.folder(path) / file)

    def _signature(self, path: TinkerPath, file: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path}/{file}?{expires}".encode(), hashlib.sha256).hexdigest()


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Returns a run's metadata as texts, which the SDK can list; services up to 0.12 stored any JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def _path_of(request: Request) -> TinkerPath:
    parts = request.path_params
    return TinkerPath.parsed(f"tinker://{parts['model_id']}/{parts['kind']}/{parts['name']}")


def _shown(described: Described) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{described.kind}/{described.name}",
        "checkpoint_type": _TYPES[described.kind],
        "time": _time(described.time),
        "tinker_path": str(described.tinker_path),
        "user_metadata": described.user_metadata,
        "expires_at": None if described.expires_at is None else _time(described.expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(items: list[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    numbers = {}
    for name, default in (("offset", 0), ("limit", 100)):
        text = request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise DataError(f"{name}={text[:40]!r} is not a whole number; send one, 0 or above")
        numbers[name] = int(text)
    offset, limit = numbers["offset"], numbers["limit"]
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
