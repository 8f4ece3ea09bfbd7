"""Bodies of requests, bounded, and answers that say what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mtrain.serve.bodies import Body

MOST_BYTES = 64 * 2**20
"""Largest body of a request, also when it is decompressed: twelve times what the SDK sends in one chunk."""
_SMALL_BYTES = 2**18
"""Size of a body, decompressed, that is read at once: a thread would take longer to start, and an idle engine wait."""
_BODY_TIMEOUT_S = 60.0
"""Time that a body may take to arrive."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")


def fault(status: int, message: str) -> Response:
    """Answers with a sentence."""
    return JSONResponse({"detail": message, "error": message}, status)


async def read_body(request: HttpRequest, kind: type[B]) -> B:
    """Reads a JSON body.

    Raises:
        ValidationError: It is none of this kind.
        HTTPException: It is too large, too slow, not whole, or compressed in a way that is not understood.
    """
    return kind.model_validate_json(await bytes_of(request))


async def bytes_of(request: HttpRequest) -> bytes:
    """Returns the body, decompressed.

    Raises:
        HTTPException: It is too large, too slow, not whole, or compressed in a way that is not understood.
    """
    body, encoding = await _arrived(request)
    return body if encoding == "identity" else await run_in_threadpool(_decompressed, body)


async def read_with(request: HttpRequest, read: Callable[[bytes], T]) -> T:
    """Reads a body with `read`, decompressed; a large one in a thread, so that other clients do not wait.

    Raises:
        HTTPException: It is too large, too slow, not whole, or compressed in a way that is not understood.
    """
    body, encoding = await _arrived(request)
    start = body if encoding == "identity" else _decompressed(body, _SMALL_BYTES)
    if len(start) <= _SMALL_BYTES:
        return read(start)
    return await run_in_threadpool(lambda: read(body if encoding == "identity" else _decompressed(body)))


async def _arrived(request: HttpRequest) -> tuple[bytes, str]:
    """Returns the body as it was sent, and how it is compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise HTTPException(415, f"content-encoding={encoding[:40]!r} is not understood; send zstd or none")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise HTTPException(413, f"the body is larger than {MOST_BYTES} bytes; send smaller batches")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive in {_BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client has gone before its body was whole") from None
    return b"".join(parts), encoding


def _decompressed(body: bytes, most: int = MOST_BYTES) -> bytes:
    """Returns the content; where it is larger than `most`, one byte more than that.

    Raises:
        HTTPException: It is none, or larger than any body may be.
    """
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            # one byte more than allowed tells a bomb, which is never held whole
            whole: bytes = stream.read(most + 1)
    except (OSError, pa.ArrowException) as error:
        raise HTTPException(400, f"the body is no zstd stream ({error})") from None
    if len(whole) > MOST_BYTES:
        raise HTTPException(413, f"the body is larger than {MOST_BYTES} bytes; send smaller batches")
    return whole
