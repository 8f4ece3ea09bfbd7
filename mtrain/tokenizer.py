"""Text to token ids and back, from files on this machine: sentencepiece models and Hugging Face `tokenizer.json`.

Text stays text: whatever a document holds, it never becomes a control token such as the end of a document. Control
tokens are added by the code that builds samples, by id.
"""

import hashlib
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_json, read_plain_file

Result = TypeVar("Result")

HF_TOKENIZER_FILE = "tokenizer.json"
PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Environment variable of the `tokenizers` library: false keeps it on one thread."""
_HF_SETTINGS = "tokenizer_config.json"
_MOST_BYTES = 1 << 28
"""Of one file; the largest have about forty million."""
_PANIC = "PanicException"
"""A fault of a library in Rust; no Exception, and its module cannot be imported to name the class."""
_HAS_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


class EncodedText(NamedTuple):
    """Token ids of a text, and where each of them lies in it."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """First character and the one after the last, of each id."""


class Tokenizer(ABC):
    """What the rest of the package needs from a tokenizer."""

    path: Path
    """The file it was read from."""
    fingerprint: str
    """SHA-256 of that file, in hex."""
    vocab_size: int
    """All ids are below it."""
    bos_id: int | None
    """Begins a sample; None where the tokenizer has none."""
    eos_id: int
    """Ends a document or an answer."""
    pad_id: int
    """Fills rows; where the tokenizer has none it is `eos_id`, which is safe because padding has weight 0."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no bos, no eos."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        """Ids of many texts; the same as `encode` of each, whatever the number of threads."""

    @abstractmethod
    def special_tokens(self) -> frozenset[str]:
        """Texts of the control tokens, such as the end of a document."""

    @abstractmethod
    def encode_with_offsets(self, text: str, *, special_tokens: bool) -> EncodedText:
        """As `encode`, with the place of each id.

        Args:
            text: Any.
            special_tokens: Whether the text of a control token becomes that token; for text whose author may write
                them, such as a chat template.

        Raises:
            DataError: A tokenizer of this kind cannot.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; control tokens are left out."""

    @abstractmethod
    def name(self, id_: int) -> str:
        """What the vocabulary calls a token, such as `</s>`; its id where it has no name."""


@final
class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        content = _content(path)
        try:
            if not content:
                raise RuntimeError("it is empty")  # the library would take it for a model without tokens
            self._model = SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as fault:
            raise DataError(
                f"{path} is not a sentencepiece model ({_one_line(fault)}); give a .model file that sentencepiece wrote"
            ) from fault
        self.path, self.fingerprint = path, hashlib.sha256(content).hexdigest()
        self.vocab_size = int(self._model.vocab_size())
        if self._model.eos_id() < 0:
            raise DataError(f"{path} has no end-of-sentence token; train the model with an eos_id of 0 or more")
        self.eos_id = int(self._model.eos_id())
        self.bos_id = int(self._model.bos_id()) if self._model.bos_id() >= 0 else None
        self.pad_id = int(self._model.pad_id()) if self._model.pad_id() >= 0 else self.eos_id

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def encode_batch(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        return list(self._model.encode(list(texts), num_threads=num_threads))

    def special_tokens(self) -> frozenset[str]:
        ids = range(self.vocab_size)
        return frozenset(str(self._model.id_to_piece(id_)) for id_ in ids if self._model.is_control(id_))

    def encode_with_offsets(self, text: str, *, special_tokens: bool) -> EncodedText:
        # the library has no such mode, and what others build on it differs in the spaces beside a control token
        raise DataError(
            f"{self.path} is a sentencepiece model, in which the text of a control token never becomes that token, as "
            "chat templates and data.special_tokens_in_text need; save it as tokenizer.json with transformers, or set "
            "data.chat_template=plain"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(id_) for id_ in ids]))

    def name(self, id_: int) -> str:
        return str(self._model.id_to_piece(id_)) if id_ < self.vocab_size else str(id_)


@final
class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library; bos, eos and pad come from `tokenizer_config.json` beside it."""

    def __init__(self, path: Path) -> None:
        content = _content(path)
        _check_prefix(path, content)
        self._model = _hugging_face_model(path, content)
        self._model.encode_special_tokens = True  # "<eos>" in a document is five characters, not the control token
        self._model_with_special_tokens: Any = None
        self.path, self.fingerprint = path, hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        settings = path.with_name(_HF_SETTINGS)
        names = json_object(settings, _content(settings)) if settings.exists() else {}
        eos = self._id(names, "eos_token")
        if eos is None:
            raise DataError(
                f"{path} has no end-of-document token; name it as eos_token in {path.with_name(_HF_SETTINGS)}"
            )
        pad = self._id(names, "pad_token")
        self.eos_id, self.bos_id = eos, self._id(names, "bos_token")
        self.pad_id = eos if pad is None else pad

    def _id(self, names: dict[str, Any], role: str) -> int | None:
        name = names.get(role)
        if isinstance(name, dict):
            name = name.get("content")
        if name is None:
            return None
        id_ = self._model.token_to_id(name) if isinstance(name, str) else None
        if id_ is None:
            raise DataError(
                f"{self.path.with_name(_HF_SETTINGS)} names {reprlib.repr(name)} as {role}, which {self.path} "
                "does not hold; take both files from the same tokenizer"
            )
        return int(id_)

    def encode(self, text: str) -> list[int]:
        return list(self._of_text(lambda: self._model.encode(text, add_special_tokens=False)).ids)

    def encode_batch(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        """Above one thread the library uses as many as RAYON_NUM_THREADS allows."""
        # a batch takes all threads unless this variable says otherwise, which the library reads at each call
        if num_threads == 1 and os.environ.get(PARALLELISM) != "false":
            return [self.encode(text) for text in texts]
        # fast: without the offsets, which nobody asks for here
        found = self._of_text(lambda: self._model.encode_batch_fast(list(texts), add_special_tokens=False))
        return [one.ids for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._of_text(lambda: self._model.decode([int(id_) for id_ in ids], skip_special_tokens=True)))

    def name(self, id_: int) -> str:
        found = self._model.id_to_token(id_)
        return str(id_) if found is None else str(found)

    def special_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self._model.get_added_tokens_decoder().values() if token.special)

    def encode_with_offsets(self, text: str, *, special_tokens: bool) -> EncodedText:
        if special_tokens and self._model_with_special_tokens is None:
            # a second model, as the mode is a property of the whole one and other threads use the first
            self._model_with_special_tokens = self._second_model()
        model = self._model_with_special_tokens if special_tokens else self._model
        found = self._of_text(lambda: model.encode(text, add_special_tokens=False))
        return EncodedText(list(found.ids), list(found.offsets))

    def serialized(self) -> str:
        """A tokenizer.json of what encodes here, without padding, cutting or tokens that begin and end a text."""
        return str(self._model.to_str())

    def _second_model(self) -> Any:
        content = _content(self.path)
        if hashlib.sha256(content).hexdigest() != self.fingerprint:
            raise DataError(f"{self.path} has changed since it was opened; start again")
        return _hugging_face_model(self.path, content)

    def _of_text(self, call: Callable[[], Any]) -> Any:
        return _called(call, f"{self.path} fails on a text", "take the file from its source again")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Opens a tokenizer; nothing is downloaded and nothing from the files runs as code.

    Args:
        path: A sentencepiece `.model`, a `tokenizer.json`, or a directory that holds one of them; a directory with
            both gives its `tokenizer.json`.

    Raises:
        DataError: Nothing is there, it is not a tokenizer, or it has no end-of-document token.
    """
    file = tokenizer_file(path)
    if file.suffix == ".json":
        return HuggingFaceTokenizer(file)
    if file.suffix == ".model":
        return SentencePieceTokenizer(file)
    raise DataError(f"{file} is neither a sentencepiece .model nor a tokenizer.json; give one of the two")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Compares a tokenizer with the model that its ids are for.

    Raises:
        DataError: It has more tokens than the model has embeddings.
    """
    # an id beyond the embedding would be an index error on a device, steps later
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, but model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer.vocab_size}, or name the model's own tokenizer"
        )


def _hugging_face_model(path: Path, content: bytes) -> Any:
    from tokenizers import Tokenizer as Model
    from tokenizers.processors import TemplateProcessing

    model = _called(
        lambda: Model.from_buffer(content),
        f"{path} is not a tokenizer.json",
        "give one that the `tokenizers` library wrote",
    )
    model.no_padding()
    model.no_truncation()
    # that of byte-level models cuts the spaces off the offsets, and without added tokens none does anything else
    model.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return model


def tokenizer_file(path: str | Path) -> Path:
    """The file that a tokenizer is read from.

    Args:
        path: As `load_tokenizer`.

    Raises:
        DataError: There is none, or more than one.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"tokenizer {path} does not exist; give a .model file, a tokenizer.json or their directory")
    if not path.is_dir():
        return path
    if (path / HF_TOKENIZER_FILE).is_file():
        return path / HF_TOKENIZER_FILE
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
        raise DataError(
            f"directory {path} holds no tokenizer.json and {len(models)} .model files, but one tokenizer is needed; "
            "name the file itself"
        )
    return models[0]


def _content(path: Path) -> bytes:
    try:
        return read_plain_file(path, _MOST_BYTES)
    except OSError as fault:
        raise DataError(f"tokenizer {path} cannot be read: {fault.strerror or fault}; check the path") from fault


def json_object(path: Path, content: bytes) -> dict[str, Any]:
    """What a file of settings beside a tokenizer holds.

    Args:
        path: For messages.
        content: Of the file.

    Raises:
        DataError: It is not JSON, or no object.
    """
    try:
        settings = parsed_json(content)
    except ValueError as fault:
        raise DataError(f"{path} is not JSON: {_one_line(fault)}; correct it") from fault
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds a {type(settings).__name__}, but a JSON object is needed; correct it")
    return settings


def _called(call: Callable[[], Result], what: str, change: str) -> Result:
    """What a call of the `tokenizers` library gives; every fault of it as one error."""
    try:
        return call()
    except BaseException as fault:
        if isinstance(fault, Exception) or type(fault).__name__ == _PANIC:  # plain Exception for every kind of fault
            raise DataError(f"{what} ({_one_line(fault)}); {change}") from fault
        raise


def _check_prefix(path: Path, content: bytes) -> None:
    """The library cuts the prefix off the second part of each merge unseen; where it is not there, the process may end.

    Raises:
        DataError: It is not there.
    """
    if not _HAS_PREFIX.search(content):
        return
    try:
        model = parsed_json(content)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges", ())
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
        is_there = all(second.startswith(prefix) for _, second in pairs)
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise DataError(f"{path} is not a tokenizer.json ({_one_line(fault)}); correct it") from fault
    if not is_there:
        raise DataError(f"{path} has merges without their prefix {prefix[:20]!r}; take the file from its source again")


def _one_line(fault: BaseException) -> str:
    """A library's message, short enough to stand inside ours."""
    return " ".join(str(fault).split())[:200]
