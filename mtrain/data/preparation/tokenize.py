"""Tokenises text into a `.bin/.idx` pair, in several processes, always to the same bytes.

With `--fast` the library gigatoken encodes, thirty times as fast as `tokenizers`. Nothing proves that both always
agree, so they are compared first on texts where tokenizers tend to differ, and then on a piece of a text of every
chunk. One difference ends the job.
"""

import collections
import functools
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError, MachineError
from mtrain.base.signals import interrupts_blocked
from mtrain.data.formats.documents import TextFiles
from mtrain.data.formats.megatron_indexed import element_type, writing_corpus
from mtrain.hf.tokenizer.tokenizer import PARALLELISM, HuggingFaceTokenizer, Tokenizer, load_tokenizer

_MOST_CHARACTERS = 4096
"""Characters of each chunk that both libraries encode: a hundredth of the chunk, a quarter of the time."""
_HARD_TEXTS = (
    "",
    " ",
    "   \n \n\n\t x  y\r\n\r z ",
    "It's I'LL we've THEY'D 'sub ''tis",
    "3.14159 1,000,000 2026-11-22 ४२ ² ⅷ 0x1F",
    "naïve nai\u0308ve e\u0301\u0301 ﬁ Å Å İ ß ς",
    "日本語のテキスト 中文\uff0c標點。 한국어",
    "ไทย العَرَبِيَّة עִבְרִית हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 \ufe0f\u200d\u200b\u00a0\u3000\u2028\u0085\ufeff\x00\x1b\x7f\ufffd\U0010ffff",
    "if (a&&b||!c){return x[i++]->y;}  // ***---===...!!!???",
    "a" * 300 + " " * 300 + "\n" * 50 + "." * 100 + "7" * 100,
    "<s></s><|endoftext|>[CLS]<unk><pad>▁_Ġ",
)
"""White space, contractions, digits, marks, scripts, signs, long runs and texts of control tokens."""


class CheckedEncoding:
    """Encodes texts with gigatoken, and compares samples with the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer that gigatoken cannot read, or for which it gives other tokens."""
        try:
            from gigatoken import gigatoken_rs as library
        except ImportError as fault:
            raise MachineError(
                "--fast needs the library gigatoken, which is not installed; install mtrain[gigatoken], or leave "
                "--fast out"
            ) from fault
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise DataError(f"--fast needs a byte-level tokenizer.json, and {tokenizer.path} is not one; leave it out")
        self._tokenizer, self._num_chunks = tokenizer, 0
        content = tokenizer.serialized()
        # their texts are plain text in a document, as `tokenizers` is set to treat them
        added = json.loads(content)["added_tokens"]
        names = [token["content"] for token in added if token["special"]]
        content = json.dumps({**json.loads(content), "added_tokens": [one for one in added if not one["special"]]})
        self._model: Any = self._called(lambda: library.load_hf_json(content))
        # gigatoken's other kind, sentencepiece as tokenizer.json, is not exact
        if not isinstance(self._model, library.BPETokenizer):
            raise DataError(f"--fast needs a byte-level tokenizer.json, and {tokenizer.path} is not one; leave it out")
        self._compare([*_HARD_TEXTS, *(f"a {name}{name} b" for name in names)])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text; raises DataError if gigatoken and the tokenizer differ."""
        # another position in each chunk
        text = texts[self._num_chunks % len(texts)]
        start = max(0, len(text) - _MOST_CHARACTERS) * (self._num_chunks % 3) // 2
        self._num_chunks += 1
        self._compare([text[start : start + _MOST_CHARACTERS]])
        return self._encoded(texts)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        # one thread: the workers are the parallelism
        ids: list[list[int]] = self._called(lambda: self._model.encode_batch_list(texts, parallel=False))
        return ids

    def _compare(self, texts: list[str]) -> None:
        for text, ids in zip(texts, self._encoded(texts), strict=True):
            if ids != self._tokenizer.encode(text):
                raise DataError(
                    f"gigatoken and {self._tokenizer.path} encode {text[:60]!r} differently, so the corpus would "
                    "change; leave --fast out"
                )

    def _called(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as fault:
            if isinstance(fault, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            # a panic in Rust is not an Exception
            shown = " ".join(str(fault).split())[:200]
            raise DataError(
                f"gigatoken cannot encode with {self._tokenizer.path} ({shown}); leave --fast out"
            ) from fault


_CHUNK_CHARACTERS = 500_000
_CHUNKS_AHEAD = 3
"""Chunks for each worker that are read before their results are written."""


@dataclass(frozen=True)
class CorpusSummary:
    num_documents: int
    num_empty: int
    """Documents without a token, which were left out."""
    num_tokens: int
    num_bytes: int
    """Size of the text in UTF-8."""
    seconds: float


class _TextChunk(NamedTuple):
    texts: list[str]
    num_bytes: int


class _Tokens(NamedTuple):
    ids: NDArray[np.generic]
    lengths: list[int]
    """Tokens in each text that has any."""
    num_empty: int


class Encoding(NamedTuple):
    """How texts become tokens; picklable, for workers."""

    tokenizer_path: Path
    append_eos: bool = True
    """Whether each document ends with the end-of-document token."""
    is_fast: bool = False
    """Whether gigatoken encodes, as `CheckedEncoding` describes."""

    def encoder(self, tokenizer: Tokenizer) -> Callable[[list[str]], _Tokens]:
        encode = (
            CheckedEncoding(tokenizer).encode
            if self.is_fast
            else functools.partial(tokenizer.encode_batch, num_threads=1)
        )
        return functools.partial(_tokens, tokenizer, encode, self.append_eos)


def tokenize_corpus(
    texts: TextFiles,
    encoding: Encoding,
    output_prefix: str,
    *,
    num_workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> CorpusSummary:
    """Writes one document for each text, in the order of the inputs.

    The pair appears when it is whole. Its bytes depend on the texts, the tokenizer and `append_eos`, not on the number
    of workers.

    Args:
        num_workers: Number of tokenising processes; 1 tokenises in this process.
        progress: Receives the bytes of text that were finished since the last call.
    """
    began = time.perf_counter()
    for path in (f"{output_prefix}.bin", f"{output_prefix}.idx"):
        if not overwrite and os.path.exists(path):
            raise DataError(f"{path} exists; choose another output prefix, or overwrite it with --overwrite")
    tokenizer = load_tokenizer(encoding.tokenizer_path)
    documents = texts.documents()
    num_empty = num_bytes = 0
    with writing_corpus(output_prefix, tokenizer.vocab_size) as writer:
        for chunk, tokens in _tokenized(_chunks(documents), encoding, tokenizer, num_workers):
            writer.add_all(tokens.ids, tokens.lengths)
            num_empty += tokens.num_empty
            num_bytes += chunk.num_bytes
            progress(chunk.num_bytes)
        if writer.num_tokens == 0:
            raise DataError(
                f"{', '.join(map(str, texts.inputs))} hold no text, so there is no corpus to write; check the inputs"
            )
    seconds = time.perf_counter() - began
    return CorpusSummary(writer.num_documents, num_empty, writer.num_tokens, num_bytes, seconds)


def _chunks(documents: Iterable[str]) -> Iterator[_TextChunk]:
    """Groups texts into chunks whose bounds depend on the texts alone."""
    group: list[str] = []
    size = num_bytes = 0
    for text in documents:
        group.append(text)
        size += len(text)
        num_bytes += len(text.encode())
        if size >= _CHUNK_CHARACTERS:
            yield _TextChunk(group, num_bytes)
            group, size, num_bytes = [], 0, 0
    if group:
        yield _TextChunk(group, num_bytes)


def _tokenized(
    chunks: Iterator[_TextChunk], encoding: Encoding, tokenizer: Tokenizer, num_workers: int
) -> Iterator[tuple[_TextChunk, _Tokens]]:
    if num_workers == 1:
        encoder = encoding.encoder(tokenizer)
        for chunk in chunks:
            yield chunk, encoder(chunk.texts)
        return
    # not fork, which would copy locks that threads of this process hold; not spawn, where each worker would
    # import everything anew, which a server imports once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "sentencepiece", "tokenizers"])
    with interrupts_blocked():  # the workers' server, hence the workers
        forkserver.ensure_running()
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=(encoding,))
    under_way: collections.deque[tuple[_TextChunk, Future[_Tokens]]] = collections.deque()
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_work, chunk.texts)))
            # bounded: one slow worker would otherwise let the whole corpus pile up in memory
            if len(under_way) >= num_workers * _CHUNKS_AHEAD:
                yield _finished(under_way)
        while under_way:
            yield _finished(under_way)
    except BrokenProcessPool as fault:
        raise MachineError(
            f"a worker of {num_workers} died, probably for lack of memory; start again with fewer workers"
        ) from fault
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(under_way: collections.deque[tuple[_TextChunk, Future[_Tokens]]]) -> tuple[_TextChunk, _Tokens]:
    # the oldest one, finished or not: chunks are written in the order of the texts
    chunk, future = under_way.popleft()
    return chunk, future.result()


_of_worker: list[Callable[[list[str]], _Tokens]] = []
"""Encodes texts in a worker process; empty elsewhere."""


def _start_worker(encoding: Encoding) -> None:
    os.environ[PARALLELISM] = "false"  # the workers are the parallelism, and threads on top would fight for processors
    _of_worker.append(encoding.encoder(load_tokenizer(encoding.tokenizer_path)))
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Ends a worker whose parent was killed; it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # from a thread: sys.exit would end this thread alone
        os._exit(1)


def _work(texts: list[str]) -> _Tokens:
    return _of_worker[0](texts)


def _tokens(
    tokenizer: Tokenizer, encode: Callable[[list[str]], list[list[int]]], append_eos: bool, texts: list[str]
) -> _Tokens:
    """Joins the ids of all texts; texts without a token get no end-of-document token."""
    encoded = [ids for ids in encode(texts) if ids]
    if append_eos:
        for ids in encoded:
            ids.append(tokenizer.eos_id)
    lengths = [len(ids) for ids in encoded]
    # one array of the corpus's own element type: small to send from the worker, and written as it is
    flat = np.fromiter(itertools.chain.from_iterable(encoded), element_type(tokenizer.vocab_size), sum(lengths))
    return _Tokens(flat, lengths, len(texts) - len(lengths))
