"""Converts text to token ids and back, with local sentencepiece models or Hugging Face's `tokenizer.json`.

Text in a document never becomes a control token; the code that builds samples adds control tokens by id.
"""

from __future__ import annotations

import hashlib
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from tokenizers import Tokenizer as Model
from tokenizers.processors import TemplateProcessing

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_json, read_plain_file
from mtrain.base.spelling import counted
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.hf.hub import how_to_download
from mtrain.hf.schema.files import json_object
from mtrain.hf.tokenizer.build import MERGES_NAME, TOKENIZER_NAME, VOCABULARY_NAME, BuiltTokenizer, build_tokenizer
from mtrain.hf.tokenizer.classes import NotReadError

Result = TypeVar("Result")

HF_TOKENIZER_FILE = TOKENIZER_NAME
PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Environment variable of the `tokenizers` library; false keeps it on one thread."""
_HF_SETTINGS = "tokenizer_config.json"
_HF_CONFIG = "config.json"
_SOURCE = "download the folder again"
_WAY_OUT = (
    "rewrite it with transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW), set tokenizer_class to "
    "PreTrainedTokenizerFast in the new tokenizer_config.json, and name the new folder"
)
_MOST_BYTES = 1 << 28
"""Largest file; the largest known ones have about 40 MB."""
_PANIC = "PanicException"
"""Name of the Rust library's error, which is not an Exception and cannot be imported."""
_NO_POST_PROCESSOR = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
_HAS_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


class EncodedText(NamedTuple):
    """Token ids of a text and their positions in it."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """Range of characters of each token: the first one, and the one after the last."""


class AddedTokens(NamedTuple):
    """Tokens that a run appends to a tokenizer's vocabulary, in this order."""

    plain: tuple[str, ...] = ()
    """Texts that become tokens wherever they occur."""
    special: tuple[str, ...] = ()


NO_TOKENS = AddedTokens()


class Tokenizer(ABC):
    added: AddedTokens = NO_TOKENS
    """Tokens that the run adds to those of the files."""

    path: Path
    fingerprint: str
    """SHA-256, in hex, of the file, or of the tokenizer's content if the file alone does not determine it."""
    vocab_size: int
    """Largest id plus one."""
    bos_id: int | None
    """Token that begins a sample; None without one."""
    eos_id: int
    """Token that ends a document or an answer."""
    begin_ids: tuple[int, ...]
    """Tokens that the tokenizer puts before a text; may be empty even if it has a `bos_id`."""
    named: Mapping[str, str]
    """Role, such as `eos_token` -> text of the special token, for chat templates."""
    pad_id: int
    """Token that pads rows; `eos_id` if the tokenizer has none, which is safe because padding has weight 0."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encodes a text, without bos and eos."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        """Encodes many texts like `encode`, in parallel."""

    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """Returns the texts of control tokens, such as the end of a document."""

    @abstractmethod
    def encode_with_offsets(self, text: str, *, special_tokens: bool) -> EncodedText:
        """Encodes a text with the position of each id.

        Args:
            special_tokens: Whether the text of a control token becomes that token, as chat templates need.

        Raises:
            DataError: This kind of tokenizer cannot convert text to control tokens.
        """

    def encodes_like(self, other: Tokenizer) -> bool:
        """Returns whether another tokenizer gives the same ids for every text, including special tokens."""
        return self.fingerprint == other.fingerprint

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to text without control tokens."""

    @abstractmethod
    def name(self, id_: int) -> str:
        """Returns a token's name in the vocabulary, such as `</s>`, or its id."""


@final
class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        content = _content(path)
        try:
            if not content:
                raise RuntimeError("it is empty")  # which the library accepts as a model without tokens
            self._model = SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as fault:
            raise DataError(
                f"{path} is not a sentencepiece model ({_one_line(fault)}); name a .model file from sentencepiece"
            ) from fault
        self.path, self.fingerprint = path, hashlib.sha256(content).hexdigest()
        self.vocab_size = int(self._model.vocab_size())
        if self._model.eos_id() < 0:
            raise DataError(f"{path} has no end-of-sentence token; use a model that was trained with eos_id >= 0")
        self.eos_id = int(self._model.eos_id())
        self.bos_id = int(self._model.bos_id()) if self._model.bos_id() >= 0 else None
        self.pad_id = int(self._model.pad_id()) if self._model.pad_id() >= 0 else self.eos_id
        self.begin_ids, self.named = () if self.bos_id is None else (self.bos_id,), {}

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def encode_batch(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        return list(self._model.encode(list(texts), num_threads=num_threads))

    def special_tokens(self) -> frozenset[str]:
        ids = range(self.vocab_size)
        return frozenset(str(self._model.id_to_piece(id_)) for id_ in ids if self._model.is_control(id_))

    def encode_with_offsets(self, text: str, *, special_tokens: bool) -> EncodedText:
        # the library has no such mode, and emulations add other spaces next to control tokens
        raise DataError(
            f"{self.path} is a sentencepiece model, which cannot convert the text of a control token to that token, as "
            "chat templates and data.special_tokens_in_text need; save it as tokenizer.json with transformers, or set "
            "data.chat_template=plain"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(id_) for id_ in ids]))

    def name(self, id_: int) -> str:
        return str(self._model.id_to_piece(id_)) if id_ < self.vocab_size else str(id_)


@final
class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer that transformers builds from a folder with `tokenizer.json`, or with `vocab.json` and `merges.txt`.

    It may differ from tokenizer.json alone; see `mtrain.hf.tokenizer.classes`.
    """

    def __init__(self, path: Path, added: AddedTokens = NO_TOKENS) -> None:
        content = _content(path)
        _check_prefix(path, content)
        files = {path.name if path.name == VOCABULARY_NAME else HF_TOKENIZER_FILE: content}
        self._model, self.named, fresh = self._built(path, files)
        for role in [role for role in ("bos_token", "eos_token") if role in fresh]:
            raise DataError(
                f"{path.with_name(_HF_SETTINGS)} names {reprlib.repr(self.named[role])} as {role}, but {path} does "
                "not have this token; use two files of the same tokenizer"
            )
        self.added = added
        self._add(path, added)
        self._model.encode_special_tokens = True  # "<eos>" in a document is five characters, not the control token
        self._model_with_special_tokens: Any = None
        self.path = path
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos = self._id("eos_token")
        if eos is None:
            raise DataError(f"{path} has no end-of-document token; set eos_token in {path.with_name(_HF_SETTINGS)}")
        pad = self._id("pad_token")
        self.eos_id, self.bos_id = eos, self._id("bos_token")
        self.pad_id = eos if pad is None else pad
        encoding = self._of_text(lambda: self._model.encode("a"))
        first = next((index for index, is_added in enumerate(encoding.special_tokens_mask) if not is_added), None)
        self.begin_ids = tuple(encoding.ids[:first]) if first is not None else ()
        # a byte-level post-processor would only remove spaces from offsets, since `encode` adds no tokens
        self._model.post_processor = _NO_POST_PROCESSOR
        self.fingerprint = hashlib.sha256(content).hexdigest()
        if path.name == VOCABULARY_NAME or self._is_changed(content):  # else as in runs of 0.1.0
            self.fingerprint = hashlib.sha256(self._model.to_str().encode()).hexdigest()

    @staticmethod
    def _built(path: Path, files: dict[str, bytes]) -> BuiltTokenizer:
        def read(name: str) -> dict[str, Any]:
            file = path.with_name(name)
            if name not in files and not file.exists():
                return {}
            return json_object(file, files.get(name) or _content(file))

        def load() -> Any:
            return _hugging_face_model(path, files[HF_TOKENIZER_FILE])

        try:
            has_file = HF_TOKENIZER_FILE in files
            return _called(lambda: build_tokenizer(path.parent, read, load, has_file), f"{path} is damaged", _SOURCE)
        except NotReadError as fault:
            raise DataError(f"tokenizer {path.parent} is not supported: {fault}; {_WAY_OUT}") from None

    def _add(self, path: Path, added: AddedTokens) -> None:
        """Adds tokens like transformers' add_tokens, but refuses existing ones."""
        first, texts = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1, sum(added, ())
        for number, text in enumerate(texts):
            if not text or text in texts[:number]:
                raise DataError(
                    f"model.add_tokens and model.add_special_tokens name {text!r} {'twice' if text else 'as a token'}; "
                    "remove it"
                )
            if (known := self._model.token_to_id(text)) is not None:
                raise DataError(
                    f"model.add_tokens or model.add_special_tokens names {text!r}, which is token {known} of {path}; "
                    "remove it, or name the tokenizer without it"
                )
        self._model.add_tokens(list(added.plain))
        self._model.add_special_tokens(list(added.special))
        for id_, text in enumerate(texts, first):
            if self._model.token_to_id(text) != id_:
                raise DataError(
                    f"{path} cannot append {text!r} to its vocabulary, because its ids have gaps; {_WAY_OUT}"
                )

    def _id(self, role: str) -> int | None:
        id_ = self._model.token_to_id(self.named[role]) if role in self.named else None
        return None if id_ is None else int(id_)

    def _is_changed(self, content: bytes) -> bool:
        """Returns whether transformers builds another tokenizer from the folder than from tokenizer.json alone."""
        alone = _hugging_face_model(self.path, content)
        alone.post_processor = _NO_POST_PROCESSOR
        return bool(alone.to_str() != self._model.to_str())

    def encode(self, text: str) -> list[int]:
        return list(self._of_text(lambda: self._model.encode(text, add_special_tokens=False)).ids)

    def encode_batch(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        """Encodes many texts; `num_threads` above 1 means as many threads as RAYON_NUM_THREADS allows."""
        # a batch uses all threads unless this variable, which the library reads at each call, is false
        if num_threads == 1 and os.environ.get(PARALLELISM) != "false":
            return [self.encode(text) for text in texts]
        # the fast variant computes no offsets
        encodings = self._of_text(lambda: self._model.encode_batch_fast(list(texts), add_special_tokens=False))
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._of_text(lambda: self._model.decode([int(id_) for id_ in ids], skip_special_tokens=True)))

    def name(self, id_: int) -> str:
        token = self._model.id_to_token(id_)
        return str(id_) if token is None else str(token)

    def special_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self._model.get_added_tokens_decoder().values() if token.special)

    def encode_with_offsets(self, text: str, *, special_tokens: bool) -> EncodedText:
        if special_tokens and self._model_with_special_tokens is None:
            # a second model, because the mode belongs to a whole model, and other threads use the first one
            self._model_with_special_tokens = type(self._model).from_str(self._model.to_str())
        model = self._model_with_special_tokens if special_tokens else self._model
        encoding = self._of_text(lambda: model.encode(text, add_special_tokens=False))
        return EncodedText(list(encoding.ids), list(encoding.offsets))

    def encodes_like(self, other: Tokenizer) -> bool:
        if not isinstance(other, HuggingFaceTokenizer):
            return False
        return self.fingerprint == other.fingerprint or self._encoding_parts() == other._encoding_parts()

    def _encoding_parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = parsed_json(self.serialized().encode())
        return {key: part for key, part in parts.items() if key not in ("version", "decoder", "post_processor")}

    def serialized(self) -> str:
        """Returns an equivalent tokenizer.json without padding, truncation or tokens around a text."""
        return str(self._model.to_str())

    def _of_text(self, call: Callable[[], Any]) -> Any:
        return _called(call, f"{self.path} cannot encode or decode", "download the file again")


def load_tokenizer(path: str | Path, added: AddedTokens = NO_TOKENS) -> Tokenizer:
    """Opens a tokenizer; downloads nothing and runs no code from the files.

    Args:
        path: A sentencepiece `.model`, a `tokenizer.json`, or a directory with one of them, which prefers
            `tokenizer.json`.

    Raises:
        DataError: The tokenizer is missing, damaged, not supported, or has no end-of-document token.
    """
    file = tokenizer_file(path)
    if any(added) and file.name != HF_TOKENIZER_FILE:
        raise DataError(f"{file} is not a tokenizer.json, which model.add_tokens needs; {_WAY_OUT}")
    if file.suffix == ".json":
        return HuggingFaceTokenizer(file, added)
    if file.suffix == ".model":
        return SentencePieceTokenizer(file)
    raise DataError(f"{file} is neither a sentencepiece .model nor a tokenizer.json; name one of the two")


def tokenizer_of(config: Sections) -> Tokenizer:
    """Opens `data.tokenizer` with the tokens that the run adds."""
    assert config.data.tokenizer is not None, "called only for runs with a tokenizer"
    return load_tokenizer(config.data.tokenizer, added_by(config.model))


def added_by(model: ModelSection) -> AddedTokens:
    """Returns the tokens that a run adds."""
    return AddedTokens(model.add_tokens, model.add_special_tokens)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that the model has embeddings for the tokens that every sample contains.

    The tokenizer may have more tokens than the model has embeddings: some Gemma 3 models have one only for images.
    Reading the data refuses samples that contain other ids beyond the table.

    Raises:
        DataError: A token that every sample contains is beyond the table.
    """
    # an id beyond the table would be an index error on a device, steps later
    highest = max(tokenizer.eos_id, *tokenizer.begin_ids, 0)
    if highest >= vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.path} has {counted(tokenizer.vocab_size, 'token')} and puts token {highest} "
            f"({tokenizer.name(highest)}) into every sample, but model.vocab_size is {vocab_size}; set "
            f"model.vocab_size to at least {tokenizer.vocab_size}, or name the model's own tokenizer"
        )


def _hugging_face_model(path: Path, content: bytes) -> Any:
    model = _called(
        lambda: Model.from_buffer(content),
        f"{path} is not a tokenizer.json",
        "name one from the `tokenizers` library",
    )
    model.no_padding()
    model.no_truncation()
    return model


def tokenizer_file(path: str | Path) -> Path:
    """Finds a tokenizer's file from its path or its directory."""
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"tokenizer {path} does not exist; name a .model file, a tokenizer.json or their directory"
            f"{how_to_download(str(path))}"
        )
    if not path.is_dir():
        return path
    if (path / HF_TOKENIZER_FILE).is_file():
        return path / HF_TOKENIZER_FILE
    if all((path / name).is_file() for name in (VOCABULARY_NAME, MERGES_NAME)):
        return path / VOCABULARY_NAME
    models = sorted(path.glob("*.model"))
    if models and any((path / name).is_file() for name in (_HF_SETTINGS, _HF_CONFIG)):
        raise DataError(
            f"tokenizer {path} is not supported: it has {models[0].name} and no tokenizer.json, and transformers "
            f"encodes text with that file differently than sentencepiece; {_WAY_OUT}, or name the .model file itself "
            "to use sentencepiece's tokens"
        )
    if len(models) != 1:
        raise DataError(
            f"directory {path} has no tokenizer.json and {len(models)} .model files, but one tokenizer is needed; "
            "name the file itself"
        )
    return models[0]


def _content(path: Path) -> bytes:
    try:
        return read_plain_file(path, _MOST_BYTES)
    except OSError as fault:
        raise DataError(f"tokenizer {path} cannot be read: {fault.strerror or fault}; check the path") from fault


def _called(call: Callable[[], Result], what: str, change: str) -> Result:
    try:
        return call()
    except (DataError, NotReadError):
        raise
    except BaseException as fault:
        if isinstance(fault, Exception) or type(fault).__name__ == _PANIC:  # the library raises plain Exceptions
            raise DataError(f"{what} ({_one_line(fault)}); {change}") from fault
        raise


def _check_prefix(path: Path, content: bytes) -> None:
    """Refuses merges that lack the prefix, as the library strips it from each second part unchecked, and may crash."""
    if not _HAS_PREFIX.search(content):
        return
    try:
        model = parsed_json(content)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges", ())
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
        has_prefix = all(second.startswith(prefix) for _, second in pairs)
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise DataError(f"{path} is not a tokenizer.json ({_one_line(fault)}); correct it") from fault
    if not has_prefix:
        raise DataError(f"{path} has merges without their prefix {prefix[:20]!r}; download the file again")


def _one_line(fault: BaseException) -> str:
    return " ".join(str(fault).split())[:200]
