"""Access checks, bounded request bodies, and error responses."""

import asyncio
import contextlib
import hmac
import re
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import TypeVar

import pyarrow as pa
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mtrain.base.errors import DataError
from mtrain.serve.operations import Body, Numbered
from mtrain.serve.protocol import Call, call_of_batch

Handler = Callable[[HttpRequest], Awaitable[Response]]
MOST_BYTES = 64 * 2**20
"""Largest body of a request, also decompressed: twelve times what the SDK sends in one chunk."""
_MOST_JSON_BYTES = 16 * 2**20
"""Largest JSON, such as a prompt of two million tokens; in memory it can take a hundred times as much."""
_SMALL_BYTES = 2**18
"""Decompressed size up to which a body is read without a thread, which would take longer to start."""
_BODY_TIMEOUT_S = 60.0
"""Longest time that a body may take to arrive."""

_TYPES = ("application/json", "application/x-protobuf")
"""Types of bodies. A page of another site must ask the service before it may send these, and the service refuses."""
_QUERY = {"offset", "limit", "access_scope", "expires", "signature"}
"""Keys of queries. access_scope is not read: every client sees everything."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:[0-9]+)?")
_NUMBER = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,200})"|"seq_id"\s*:\s*([0-9]{1,19})(?![0-9.eE])')

B = TypeVar("B", bound=Body)
T = TypeVar("T")


def check_access(request: HttpRequest, token: str | None, is_signed: bool) -> None:
    """Checks the headers of a request; raises HTTPException if the sender may not call, or uses unknown types.

    Args:
        token: Key of the service; None admits programs of this machine, but not pages in its browsers.
        is_signed: Whether a signature in the address replaces the key.

    Raises:
        DataError: The address has an unknown key.
    """
    headers = request.headers
    if token is None:
        _check_local(request)
    # as bytes: compare_digest takes only ASCII texts
    elif not is_signed and not hmac.compare_digest(headers.get("x-api-key", "").encode(), token.encode()):
        raise HTTPException(401, "the key does not match; set TINKER_API_KEY to the key of this service")
    kind = headers.get("content-type", _TYPES[0]).partition(";")[0].strip().lower()
    if request.method not in ("GET", "HEAD") and kind not in _TYPES:
        raise HTTPException(415, f"content-type={kind[:80]!r} is not understood; send {' or '.join(_TYPES)}")
    if unknown := request.query_params.keys() - _QUERY:
        raise DataError(f"{min(unknown)[:80]!r} in the address is not known here; leave it out")


def _check_local(request: HttpRequest) -> None:
    """Refuses requests of pages in a browser: without a key, any page could call a service on loopback."""
    match = _HOST.fullmatch(request.headers.get("host", ""))
    if match is None or not _is_loopback(match[1].strip("[]")):
        host = request.headers.get("host", "")[:200]
        raise HTTPException(403, f"host={host!r} is not this machine; call 127.0.0.1, or give the service a key")
    site = request.headers.get("sec-fetch-site", "none")
    if "origin" in request.headers or site != "none":
        raise HTTPException(403, "pages in a browser may not call a service without a key; call it from a program")


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower() in ("localhost", "localhost.")


def sentence_of(error: DataError | ValidationError | HTTPException) -> str:
    """Returns the reason for refusing a request, as one sentence."""
    if isinstance(error, HTTPException):
        return error.detail
    if isinstance(error, DataError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))[-200:] or "the body"
    if first["type"] == "extra_forbidden":
        return f"{where} is not known here; leave it out"
    return f"{where}: {first['msg']}"


def _readable_part(body: bytes) -> bytes:
    """Returns the decompressed body, or its beginning if it is too large or damaged."""
    for most in (MOST_BYTES, 2**12):
        with contextlib.suppress(HTTPException):
            return _decompressed(body, most, MOST_BYTES)
    return b""


async def call_of(request: HttpRequest) -> Call | None:
    """Returns the model and number of a call, even of one that is not understood; None if unknown."""
    arrived: tuple[bytes, str] | None = getattr(request.state, "arrived", None)
    return None if arrived is None else await run_in_threadpool(_call_of, request.url.path, *arrived)


def _call_of(path: str, body: bytes, encoding: str) -> Call | None:
    if encoding != "identity":
        body = _readable_part(body)
    if path.endswith("/forward_backward"):
        return call_of_batch(body)
    try:
        numbered = Numbered.model_validate_json(body)
        return Call(numbered.model_id, numbered.seq_id, is_of_step=False)
    except ValidationError:  # too deep or incomplete, say; without its number, later calls would wait a minute
        matches = _NUMBER.findall(body)
    model_id = next((model_id for model_id, _ in matches if model_id), None)
    number = next((number for _, number in matches if number), None)
    if model_id is None or number is None:
        return None
    return Call(model_id.decode(errors="replace"), int(number), is_of_step=False)


def fault(status: int, message: str) -> Response:
    return JSONResponse({"detail": message, "error": message}, status)


async def read_body(request: HttpRequest, kind: type[B]) -> B:
    """Reads a JSON body.

    Raises:
        ValidationError: It is not of this kind.
        HTTPException: It is too large, too slow, incomplete, or compressed in an unknown way.
    """
    return await read_with(request, kind.model_validate_json, _MOST_JSON_BYTES)


async def read_with(request: HttpRequest, read: Callable[[bytes], T], most: int = MOST_BYTES) -> T:
    """Parses a body of at most `most` bytes, decompressed, with `read`; a large one in a thread, so that other clients
    do not wait. Raises as `read_body` does."""
    body, encoding = await _arrived(request, most)
    start = body if encoding == "identity" else _decompressed(body, _SMALL_BYTES, most)
    if len(start) <= _SMALL_BYTES:
        return read(start)
    return await run_in_threadpool(lambda: read(body if encoding == "identity" else _decompressed(body, most, most)))


async def _arrived(request: HttpRequest, most: int) -> tuple[bytes, str]:
    """Returns the body as received, and its compression."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise HTTPException(415, f"content-encoding={encoding[:40]!r} is not understood; send zstd or none")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    request.state.arrived = b"".join(parts), encoding
                    raise _too_large(most)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive in {_BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected before its body was complete") from None
    arrived = request.state.arrived = b"".join(parts), encoding
    return arrived


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes; send less at once")


def _decompressed(body: bytes, at_once: int, most: int) -> bytes:
    """Returns the content; if it is larger than `at_once`, one byte more than that."""
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            # one byte more than allowed reveals a decompression bomb without unpacking all of it
            whole: bytes = stream.read(at_once + 1)
    except (OSError, pa.ArrowException) as error:
        raise HTTPException(400, f"the body is not a zstd stream ({error})") from None
    if len(whole) > most:
        raise _too_large(most)
    return whole
