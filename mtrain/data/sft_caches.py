"""Token caches of the sources of a finetuning run (`data.*`)."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mtrain.base.errors import DataError, NumericError
from mtrain.base.spelling import counted
from mtrain.config.extras import ROUTED_EXPERTS, TEMPERATURE, choice_columns
from mtrain.config.schema.data import SftSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.output import HeadOutput
from mtrain.core.batch.choices import expert_fault
from mtrain.core.batch.numbers import top_k_fault
from mtrain.core.batch.sample import SampleEncoder
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.entry import TokenCache
from mtrain.data.cache.opening import CacheOptions, default_folder, token_cache
from mtrain.data.encoding.compared import image_processor, source_encoder
from mtrain.data.formats.record_files import left_out, record_files, source_files
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import AddedTokens, Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

_NOT_OF_RECORDS = frozenset(
    {"train", "curriculum", "valid", "test", "split", "seq_length", "prefetch_steps", "tokenizer", "too_long"}
    | {"packing", "on_bad", "max_bad", "cache_dir", "cache_check", "allow_other_tokenizer", "images"}
)
"""Keys that affect neither a record's tokens nor whether it is valid. Another value of any other key means another
entry, even if the encoder's fingerprint ignores it: a record that one value refuses may be accepted by another. The
encoder's fingerprint includes the processor of images."""
_MOST_SHOWN = 3


class SftCaches:
    """Token caches of the sources; each source is opened once, even if a split uses it for several parts."""

    def __init__(
        self,
        section: SftSection,
        tokenizer: Tokenizer,
        model: ModelSection,
        compares: Literal["pairs", "answers"] | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Args:
        compares: Form of records of compared answers; None if a record is one sequence.
        columns: Columns of extras if these are labels of records; None: those of `section`."""
        self._section, self._model, self._columns = section, model, columns or section.extra_columns
        self._added = tokenizer.added
        self.images = image_processor(section, model)
        """Processor of images; None if the model reads only text."""
        self._of_records = (compares, model.head, bool(columns), self.images)
        # left out if empty, so that entries of versions without these keys remain valid
        empty = {key for key in ("extras", "columns", "chat_template_kwargs") if not getattr(section, key)}
        records = section.model_dump_json(exclude={*_NOT_OF_RECORDS, *empty})
        self._fingerprint = f"{source_encoder(section, tokenizer, *self._of_records).fingerprint} {records}"
        self._folder = Path(section.cache_dir) if section.cache_dir is not None else default_folder()
        self._opened: dict[str, TokenCache] = {}

    def open(self, path: str) -> TokenCache:
        """Opens the tokens of one source, or builds them."""
        if path in self._opened:
            return self._opened[path]
        section, vocab_size = self._section, self._model.vocab_size
        job = EncodingJob(tuple(record_files(path)), partial(_new_encoder, section, self._added, *self._of_records))
        options = CacheOptions(
            self._folder,
            reads_all=section.cache_check == "content",
            stops_at_bad=section.on_bad == "refuse",
            say=_log.info,
        )
        cache = token_cache(job, self._fingerprint, options)
        _check_bad(cache, path, section)
        _check_extras(cache, self._columns, self._model)
        if cache.highest_id >= vocab_size:
            raise DataError(
                f"{path} holds token {cache.highest_id}, but model.vocab_size is {vocab_size}; use the model's own "
                "tokenizer or raise model.vocab_size"
            )
        self._opened[path] = cache
        return cache

    def notes(self) -> Iterator[str]:
        """Yields lines for the user on records and files that were left out."""
        for path, cache in self._opened.items():
            if empty := source_files(path).empty:
                yield f"{path}: {left_out(empty)}"
            if cache.num_bad:
                count = f"{cache.num_bad:,} of {counted(cache.num_records, 'record', ',')}"
                yield f"{path}: {count} {'is' if cache.num_bad == 1 else 'are'} bad and left out: {_shown(cache)}"


def _new_encoder(
    section: SftSection,
    added: AddedTokens,
    compares: Literal["pairs", "answers"] | None,
    head: HeadOutput | None,
    is_number: bool,
    images: ImageProcessor | None,
) -> SampleEncoder:
    assert section.tokenizer is not None  # a rule of the section
    return source_encoder(section, load_tokenizer(section.tokenizer, added), compares, head, is_number, images)


def _check_bad(cache: TokenCache, path: str, section: SftSection) -> None:
    """Checks the bad records of an entry, which a run with another data.on_bad may have built."""
    count, most = cache.num_bad, section.max_bad
    if count == 0:
        return
    if section.on_bad == "refuse":
        raise DataError(cache.bad_records()[0])
    if count > (most if most >= 1 else most * cache.num_records):
        raise DataError(
            f"{path}: {count:,} of {counted(cache.num_records, 'record', ',')} {'is' if count == 1 else 'are'} bad, "
            f"more than data.max_bad={most:g} allows: {_shown(cache)}; fix them, or raise data.max_bad"
        )


def _check_extras(cache: TokenCache, names: Sequence[str], model: ModelSection) -> None:
    """Refuses numbers that are not finite, log-probabilities that cannot come from a teacher, and experts that the
    model does not have or that a token names twice."""
    is_bad = ~np.isfinite(cache.extras)
    if is_bad.any():
        token, column = (int(indices[0]) for indices in np.nonzero(is_bad))
        location, number = _location_of_token(cache, token)
        raise NumericError(
            f"{location}: has an extra {names[column]!r} that is {cache.extras[token, column]} at token {number}; all "
            "its numbers must be finite in float32, even where the mask is 0: check the program that wrote it, and "
            "write 0 for missing numbers"
        )
    _check_temperatures(cache, names)
    teacher = top_k_fault(cache.extras, names, cache.is_counted, model.vocab_size) if names else None
    if teacher is not None:
        location, number = _location_of_token(cache, teacher.row)
        raise DataError(f"{location}: has, at token {number}, {teacher.why}")
    columns, _ = choice_columns(names)
    fault = expert_fault(cache.extras, columns, model) if columns else None
    if fault is not None:
        location, number = _location_of_token(cache, fault.token)
        raise DataError(f"{location}: {ROUTED_EXPERTS} of token {number} {fault.why}")


def _check_temperatures(cache: TokenCache, names: Sequence[str]) -> None:
    if TEMPERATURE not in names:
        return
    # the first token of a sample is not predicted; if the record omits its temperature, it is 0
    is_bad = cache.extras[:, names.index(TEMPERATURE)] <= 0
    is_bad[cache.starts[:-1]] = False
    if is_bad.any():
        token = int(np.argmax(is_bad))
        location, number = _location_of_token(cache, token)
        raise DataError(
            f"{location}: has a {TEMPERATURE!r} of {cache.extras[token, names.index(TEMPERATURE)]} at token {number}, "
            "but logits are divided by it; give numbers above 0"
        )


def _location_of_token(cache: TokenCache, token: int) -> tuple[str, int]:
    """Returns the record of a token, and the token's number in it."""
    index = int(np.searchsorted(cache.starts, token, side="right")) - 1
    return cache.location(index), int(token - cache.starts[index])


def _shown(cache: TokenCache) -> str:
    more = cache.num_bad - _MOST_SHOWN
    return "; ".join([*cache.bad_records()[:_MOST_SHOWN], *([f"and {more:,} more"] if more > 0 else [])])
