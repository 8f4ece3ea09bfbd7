"""Encoding by the library gigatoken, thirty times as fast as `tokenizers`, and compared with it.

Nothing proves that two programs always agree, so they are compared on texts on which tokenizers tend to differ, before
the first text, and on a piece of a text of every chunk. One difference ends the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mtrain.base.errors import DataError, MachineError
from mtrain.tokenizer import HuggingFaceTokenizer, Tokenizer

_MOST_CHARACTERS = 4096
"""Number of characters of each chunk that both libraries encode: a hundredth of the chunk, a quarter of the time."""
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
"""Texts with white space, contractions, digits, marks, scripts, signs, long runs and the texts of control tokens."""


class CheckedEncoding:
    """Encoder of texts by gigatoken, which is compared with the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Args:
            tokenizer: Tokenizer that gigatoken has to agree with.

        Raises:
            DataError: gigatoken cannot read the tokenizer, or gives other tokens.
            MachineError: gigatoken is not installed.
        """
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
        """Returns the ids of each text.

        Raises:
            DataError: gigatoken and the tokenizer differ.
        """
        # another place in each chunk
        text = texts[self._num_chunks % len(texts)]
        start = max(0, len(text) - _MOST_CHARACTERS) * (self._num_chunks % 3) // 2
        self._num_chunks += 1
        self._compare([text[start : start + _MOST_CHARACTERS]])
        return self._encoded(texts)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        # one thread: the workers are the parallelism
        found: list[list[int]] = self._called(lambda: self._model.encode_batch_list(texts, parallel=False))
        return found

    def _compare(self, texts: list[str]) -> None:
        for text, found in zip(texts, self._encoded(texts), strict=True):
            if found != self._tokenizer.encode(text):
                raise DataError(
                    f"gigatoken encodes {text[:60]!r} not as {self._tokenizer.path} does, so the corpus would be "
                    "another one; leave --fast out"
                )

    def _called(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as fault:
            if isinstance(fault, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            # a panic in Rust is no Exception
            shown = " ".join(str(fault).split())[:200]
            raise DataError(
                f"gigatoken cannot encode with {self._tokenizer.path} ({shown}); leave --fast out"
            ) from fault
