"""`data.*`: sources of samples."""

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mtrain.config.extras import ROUTED_EXPERTS, columns_of, key_and_sizes
from mtrain.config.schema import bounds
from mtrain.config.schema.section import AS_LIST, BY_NAME, Section, by_kind

_KEYS_OF_SAMPLES = frozenset({"input_ids", "loss_mask", "weight", "messages", "prompt", "response", "text", "tools"})
_READ_BY_TEMPLATES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class SourceSection(Section):
    """One corpus of a blend."""

    path: Annotated[str, bounds.PATH] = Field(min_length=1)
    """Location of the corpus. indexed: the prefix of the .bin/.idx pair. sft: a file, a pattern such as
    `data/*.jsonl.zst`, a folder, or a dataset that Hugging Face's `datasets` saved to disk."""
    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the other sources."""


class BlendSection(Section):
    """A blend that replaces the previous one at a given step."""

    from_step: Annotated[int, bounds.STEPS] = Field(gt=0)
    """Updates completed before the blend begins: its first step is from_step + 1 in metrics.jsonl."""
    sources: tuple[SourceSection, ...] = Field(min_length=1)
    """All sources of the blend. A path that an earlier blend named is the same source, and continues its epoch."""


class WindowChange(Section):
    """A window size that applies from a given step."""

    from_step: Annotated[int, bounds.STEPS] = Field(gt=0)
    """Updates completed before the change. Windows that begin later have this size; a window in progress keeps its
    packing."""
    window: Annotated[int, bounds.BATCH] = Field(gt=0)
    """Number of samples packed together."""


class PackingSection(Section):
    """Several samples per row; attention and positions restart at each sample, and the loss counts samples, not
    rows."""

    batch: Literal["sequences", "rows"] = "sequences"
    """Unit of train.global_batch_size. sequences: samples, so a step holds the same samples as without packing, for any
    row width. rows: packed rows, filled from windows of samples in order, so that all are full; a step's samples then
    depend on the row width, but not on the number of ranks."""
    window: Annotated[int, bounds.BATCH] = Field(65536, gt=0)
    """Largest number of samples packed together; batch=rows only. A window ends early where a source begins a new
    epoch, so that epochs do not mix."""
    across_epochs: bool = False
    """Whether a window may hold several epochs of a source; batch=rows only. Each sample is then read exactly once per
    epoch only if the whole window is read. Runs that began before this key existed continue with true."""
    later: tuple[WindowChange, ...] = ()
    """Later window sizes, by ascending steps; batch=rows only. A resumed run may add them for future steps: no sample
    is repeated or left out."""

    def broken_rules(self) -> Iterator[str]:
        steps = [change.from_step for change in self.later]
        if self.batch != "rows" and self.later:
            yield f"later names window sizes, but batch={self.batch} has no windows; set batch=rows, or remove it"
        elif self.batch != "rows" and self.across_epochs:
            yield (
                f"across_epochs=true concerns windows, but batch={self.batch} has none; set batch=rows, or remove it"
            )
        elif steps != sorted(set(steps)):
            yield f"later begins at steps {', '.join(map(str, steps))}, which must ascend; put them in order"


def _form(value: object) -> str:
    return BY_NAME if isinstance(value, Mapping) else AS_LIST


HeldOutSources = Annotated[
    Annotated[tuple[SourceSection, ...], Tag(AS_LIST)] | Annotated[dict[str, tuple[SourceSection, ...]], Tag(BY_NAME)],
    Discriminator(_form),
]
"""One held-out set as a list of sources, or several sets by name."""


class DataSection(Section):
    """Keys that all kinds of data share."""

    kind: str
    """Kind of the data; each kind is a section with additional keys."""
    seq_length: Annotated[int, bounds.POSITIONS] = Field(gt=1)
    """Number of tokens in a sample."""
    tokenizer: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Path of a sentencepiece `.model`, a `tokenizer.json`, or a directory that holds one of them. sft needs it."""
    allow_other_tokenizer: bool = False
    """Whether the tokenizer may produce other ids than the one that came with the weights (`model.hf`, an import)."""
    seed: Annotated[int | None, bounds.SEED] = Field(None, ge=0)
    """Seed of the order of samples, and of the tokens of kind=mock. null: train.seed."""
    prefetch_steps: Annotated[int, bounds.BATCHES_AHEAD] = Field(2, ge=0)
    """Global batches that a thread reads ahead; 0 reads in the training loop."""
    packing: PackingSection | None = None
    """Packing of several samples into a row, as in `packing: {batch: sequences}`; null: one sample per row."""

    extras: tuple[str, ...] = ()
    """Keys of a record whose values loss functions read in addition to the weights, such as [advantages, old_logprobs]
    (docs/training/policy-losses.md); sft only. Each is a number for the sample, or a list with a number per token;
    `topk_ids:8` is a key `topk_ids` with 8 numbers per token (docs/explanation/objective.md), `routed_experts:48x8` the
    experts that a rollout chose in 48 layers, 8 in each, which routers then use (docs/training/rl.md)."""

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns of extras, each with one number per token: `topk_ids:2` has topk_ids[0] and topk_ids[1]."""
        return tuple(name for extra in self.extras for name in columns_of(extra))

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the extras with the experts that routers use."""
        return tuple(key for key, _ in map(key_and_sizes, self.extras) if key == ROUTED_EXPERTS)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sources whose losses are reported separately, by number; empty for a single source."""
        return ()

    def broken_rules(self) -> Iterator[str]:
        if self.extras and self.kind != "sft":
            yield f"extras={list(self.extras)} are keys of records, but kind={self.kind} has none; set kind to sft"
            return
        try:
            names = [key_and_sizes(extra)[0] for extra in self.extras]
        except ValueError as error:
            yield (
                f"extras names {error.args[0]!r}, but the colon must be followed by the count of numbers per token, as "
                "in topk_ids:8"
            )
            return
        repeated = _first_repeated(names)
        wrong = next((name for name in names if name in _KEYS_OF_SAMPLES or not name.isidentifier()), None)
        if repeated is not None:
            yield f"extras names {repeated!r} twice; name it once"
        elif wrong is not None:
            yield (
                f"extras names {wrong!r}, but a name has only letters, digits and underscores, and is not a key of any "
                "record format; rename the key in the records"
            )


class FilesSection(DataSection):
    """Keys of data from files: a blend of sources, and held-out sets."""

    train: tuple[SourceSection, ...] = ()
    """Sources of the first blend."""
    curriculum: tuple[BlendSection, ...] = ()
    """Blends that replace it, each at a given step."""
    valid: HeldOutSources = ()
    """Sources of a validation set, or several sets as `{name: [sources]}`. Each set has its own loss; the first set's
    is `valid_loss`, which decides the best checkpoints unless valid.metric names another set."""
    test: tuple[SourceSection, ...] = ()
    """Sources of the test set."""
    split: tuple[float, float, float] | None = None
    """Shares of train, valid and test, by documents in file order, as in [0.9, 0.1, 0]; replaces valid and test. null:
    all of train is used for training."""

    @property
    def valid_sets(self) -> dict[str, tuple[SourceSection, ...]]:
        """Returns the validation sets by name, in order; a single set is called valid."""
        if isinstance(self.valid, dict):
            return self.valid
        return {"valid": self.valid} if self.valid else {}

    @property
    def all_sources(self) -> tuple[SourceSection, ...]:
        """Returns the sources of train, then those of the curriculum, each once; a source's number is its index."""
        # later blends add their sources at the end, so changing them leaves earlier numbers as they were
        known = {source.path for source in self.train}
        later = [source for blend in self.curriculum for source in blend.sources]
        new = {source.path: source for source in later if source.path not in known}
        return (*self.train, *new.values())

    @property
    def source_names(self) -> tuple[str, ...]:
        """Path endings that distinguish the sources, by number; empty for a single source."""
        paths = [source.path for source in self.all_sources]
        return _short_names(paths) if len(paths) > 1 else ()

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.curriculum:
            yield from self._broken_rules_of_curriculum()
        # names become TensorBoard tags and words in console lines
        wrong = next((name for name in self.valid_sets if not re.fullmatch(r"[\w.-]{1,40}", name, re.ASCII)), None)
        empty = next((name for name, sources in self.valid_sets.items() if not sources), None)
        if wrong is not None:
            yield f"valid names a set {wrong!r}; a name is up to 40 letters, digits, dots, dashes and underscores"
        elif empty is not None:
            yield f"valid.{empty} has no source; name at least one, or remove the set"
        if not self.train:
            yield (
                f"train is empty, but kind={self.kind} reads from files; name at least one source, or set kind to mock"
            )
        if self.split is None:
            return
        if self.valid or self.test:
            yield "split already divides the train sources, but valid or test are also given; remove one of the two"
        if min(self.split) < 0 or self.split[0] == 0 or abs(sum(self.split) - 1) >= 1e-6:
            yield (
                f"split={list(self.split)} needs three shares that are not negative and add up to 1, the first above "
                "0; write for instance [0.9, 0.1, 0]"
            )

    def _broken_rules_of_curriculum(self) -> Iterator[str]:
        steps = [blend.from_step for blend in self.curriculum]
        wrong = next((number for number in range(1, len(steps)) if steps[number] <= steps[number - 1]), None)
        if wrong is not None:
            yield (
                f"curriculum[{wrong}].from_step={steps[wrong]} must be above the previous blend's "
                f"{steps[wrong - 1]}; order the blends by from_step"
            )
        blends = {"train": self.train}
        blends |= {f"curriculum[{number}].sources": blend.sources for number, blend in enumerate(self.curriculum)}
        for name, sources in blends.items():
            if repeated := _first_repeated([source.path for source in sources]):
                yield f"{name} names {repeated} twice; name it once, with the sum of the weights"
        if self.packing is not None and self.packing.batch != "sequences":
            yield (
                "curriculum changes blends at a step, but with packing.batch=rows a packed window of samples would "
                "span it; set packing.batch=sequences"
            )


class IndexedSection(FilesSection):
    """Pretraining on Megatron's .bin/.idx corpora; the default kind."""

    kind: Literal["indexed"] = "indexed"
    isolate_documents: bool = False
    """Whether attention and positions restart at each document, and no token is predicted across documents."""

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.packing is not None:
            yield (
                "packing puts samples of different lengths into rows, but kind=indexed cuts running text into full "
                "rows; remove packing, or set isolate_documents=true to keep the documents of a row apart"
            )


class ImagesSection(Section):
    """Sizes of images, for a model with model.vision; the processor in the tokenizer's folder sets the rest."""

    min_pixels: Annotated[int | None, bounds.PIXELS] = Field(None, gt=0)
    """Smallest area of a resized image, in pixels; smaller images are enlarged. null: the processor's."""
    max_pixels: Annotated[int | None, bounds.PIXELS] = Field(None, gt=0)
    """Largest area of a resized image, in pixels; larger images are reduced. null: the processor's."""

    def broken_rules(self) -> Iterator[str]:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            yield f"min_pixels={self.min_pixels} must be at most max_pixels={self.max_pixels}; change one of them"


class SftSection(FilesSection):
    """Finetuning on records: JSON lines (plain, gzip, zstd), parquet, Arrow, datasets of Hugging Face on disk."""

    kind: Literal["sft"]
    too_long: Literal["end", "start", "drop", "refuse", "split"] = "end"
    """Treatment of a sample of more than seq_length + 1 tokens (the last is only predicted): end and start cut it
    there, drop leaves it out, refuse ends the run, split makes several samples of it."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """Treatment of an invalid record: refuse ends the run before its first step, skip leaves the record out."""
    max_bad: float = Field(0.01, ge=0)
    """Largest number of bad records that skip leaves out of a source: a share below 1, or a whole number."""
    cache_dir: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Folder of the token cache, for all runs; null: `$XDG_CACHE_HOME/mtrain` or `~/.cache/mtrain`. Several nodes
    should share it."""
    cache_check: Literal["stat", "content"] = "stat"
    """How a start checks that a file has not changed since it was tokenised: stat trusts size, inode, mtime and ctime;
    content reads the file."""
    format: Literal[
        "auto",
        "messages",
        "prompt_response",
        "text",
        "tokens",
        "sharegpt",
        "alpaca",
        "preference",
        "unpaired_preference",
    ] = "auto"
    """Form of the records (docs/data/finetuning.md). auto distinguishes messages, prompt with response, and input_ids;
    if loss.function compares answers, it means preference or unpaired_preference (docs/training/preference.md)."""
    chat_template: Annotated[str, bounds.PATH] = Field("auto", min_length=1)
    """Chat template. auto: the template in the tokenizer's folder, without which conversations are refused. plain: each
    message is "### role" and its content. Otherwise the name of one of the tokenizer's templates, or the path of a
    .jinja file."""
    chat_date: str | None = Field(None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Date, as in 2025-01-31, that a template writes as today's, so that samples do not change from day to day; null: a
    template that asks for the date is refused."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables for the chat template, such as `{enable_thinking: false}`; a record's own values take precedence."""
    loss_on: Literal["all_answers", "last_answer"] = "all_answers"
    """Messages of the assistant that are in the loss."""
    special_tokens_in_text: bool = False
    """Whether a special token's text in a message, prompt, response or text becomes that token."""
    images: ImagesSection = ImagesSection()
    columns: dict[str, str] = Field({})
    """Column names in the files -> keys of the record format, as in `{question: prompt, answer: response}`."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of records and messages to ignore, such as [id, source]; other unknown keys are refused."""

    @property
    def isolate_documents(self) -> bool:
        """Whether rows hold several documents; only packed rows do."""
        return self.packing is not None

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if (repeated := _first_repeated(list(self.columns.values()))) is not None:
            yield f"columns maps two names to {repeated!r}; map one of them to another key"
        if reserved := sorted(_READ_BY_TEMPLATES & self.chat_template_kwargs.keys()):
            yield f"chat_template_kwargs sets {reserved[0]}, which follows from each record; remove it"
        if self.max_bad >= 1 and self.max_bad != int(self.max_bad):
            yield (
                f"max_bad={self.max_bad} is neither a share below 1 nor a whole number of records; set it to one of "
                "the two"
            )
        if self.chat_date is not None and not _is_day(self.chat_date):
            yield f"chat_date={self.chat_date} is not a calendar day; write it as in 2025-01-31"
        if self.tokenizer is None:
            yield "tokenizer is not given, but kind=sft reads text; name the tokenizer that turns it into tokens"


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def is_path_of_template(choice: str) -> bool:
    """Says whether a value of `data.chat_template` is the path of a file."""
    return "/" in choice or choice.endswith(".jinja")


def _short_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Shortens each path to the last parts that distinguish it, and numbers equal paths."""
    parts = [PurePosixPath(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]).replace("//", "/") for part in parts]
        if len(set(names)) == len(set(paths)):
            break
    return tuple(name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names))


def _is_day(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


class MockSection(DataSection):
    """Random tokens, to try a layout without files."""

    kind: Literal["mock"]
    isolate_documents: bool = False
    """Whether attention and positions restart at each document; each sample is one document."""

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.packing is not None and not self.isolate_documents:
            yield "packing keeps the samples of a row apart, but isolate_documents=false; set isolate_documents=true"


AnyData = Annotated[
    Annotated[IndexedSection, Tag("indexed")] | Annotated[SftSection, Tag("sft")] | Annotated[MockSection, Tag("mock")],
    by_kind("indexed"),
]
