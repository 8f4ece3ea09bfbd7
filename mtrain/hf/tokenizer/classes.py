"""Finds the class that transformers chooses for a folder, and builds that class's tokenizer.

A generic class uses tokenizer.json as it is. Others build normalizer, pre-tokenizer and model in code, and take only
vocabulary, merges and post-processor from the file; this module rebuilds the known ones.

Source: transformers 5.24, models/auto/tokenization_auto.py (AutoTokenizer.from_pretrained) and the classes' own files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_TABLES = json.loads(Path(__file__).with_name("classes.json").read_text())
CLASS_OF_MODEL = {model: name for name, models in _TABLES["of_models"].items() for model in models.split()}
"""`model_type` of config.json -> class of its tokenizers."""
WRONG_CLASS = frozenset(_TABLES["wrong"].split())
"""Models whose published tokenizer_config.json names a class that transformers does not use."""
CLASSES = frozenset(_TABLES["of_models"].keys()).union(_TABLES["of_no_model"].split())
"""All classes in these tables, without `Fast`; any other name means the generic class."""
GENERIC = "TokenizersBackend"
_NOT_SPECIFIC = frozenset({GENERIC, "PythonBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast"})
_AS_THE_FILE_SAYS = frozenset({GENERIC, "BloomTokenizer", "ConvBertTokenizer", "FNetTokenizer", "ParakeetTokenizer"})
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]
Build = Callable[[Vocabulary, Merges, Mapping[str, Any]], Any]
"""Builds a `tokenizers.Tokenizer` from vocabulary, merges and settings."""


class NotReadError(Exception):
    """transformers cannot read the folder, or reads it with unknown code; the message says why."""


@dataclass(frozen=True)
class BuiltClass:
    """A transformers class that builds the parts of a tokenizer in code."""

    build: Build
    named: Mapping[str, str | None]
    """Role -> default special token."""
    adds_named: str | None = None
    """How its code adds the named tokens again: "special" adds special tokens, "posted" adds them as the settings have
    them, None does not add them."""
    drops_post_processor: bool = False
    """Whether its code replaces tokenizer.json's post-processor by one that adds the settings' tokens."""
    reads_merges_file: bool = True
    """Whether it can read vocab.json and merges.txt without a tokenizer.json."""


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], is_byte_level: bool) -> str:
    """Returns the class that AutoTokenizer chooses, without `Fast`, or `GENERIC`."""
    class_name, model = _text(settings.get("tokenizer_class")), _text(config.get("model_type"))
    named = class_name or _text(config.get("tokenizer_class"))
    registered = CLASS_OF_MODEL.get(model)
    is_wrong = model in WRONG_CLASS or config.get("model_name") in WRONG_CLASS
    has_code = _has_code(settings)
    if not has_code and named == "LlamaTokenizer" and not is_wrong and is_byte_level:
        return GENERIC
    if not has_code and named and registered is not None and registered != named:
        if registered not in _NOT_SPECIFIC:
            chosen = registered if is_wrong else named
            if chosen in CLASSES and chosen not in _NOT_SPECIFIC:
                return chosen
        return GENERIC
    if has_code and model not in WRONG_CLASS and registered is None and class_name not in CLASSES | _NOT_SPECIFIC:
        raise NotReadError("its tokenizer_config.json names custom code (auto_map), which mtrain does not run")
    chosen = named or registered or GENERIC
    return chosen if chosen in CLASSES else GENERIC


def built_class(name: str) -> BuiltClass | None:
    """Returns the class if it builds its parts in code; None if it uses tokenizer.json as it is."""
    if name in _AS_THE_FILE_SAYS:
        return None
    if name not in _BUILT:
        raise NotReadError(f"transformers reads it with its class {name}, which mtrain does not know")
    return _BUILT[name]


def _has_code(settings: Mapping[str, Any]) -> bool:
    code = settings.get("auto_map")
    return bool(code.get("AutoTokenizer")) if isinstance(code, dict) else bool(code)


def _text(value: object) -> str:
    return value.removesuffix("Fast") if isinstance(value, str) else ""


def _byte_level(pieces: Callable[[Any], Any], normalizer: Any = None) -> Build:
    """Returns the builder of a byte-level BPE model; `pieces` makes the pre-tokenizer from add_prefix_space."""

    def build(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
        parts = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, dropout=None, **parts))
        tokenizer.pre_tokenizer = pieces(settings.get("add_prefix_space", False))
        tokenizer.decoder = decoders.ByteLevel()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        return tokenizer

    return build


def _bytes(space: Any) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=space)


def _digits_and_bytes(space: Any) -> Any:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=space, trim_offsets=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])


def _qwen(pattern: str) -> Build:
    def pieces(space: Any) -> Any:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False if space is None else space, use_regex=False)
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, bytes_])

    return _byte_level(pieces, normalizers.NFC())


def _llama(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    has_space = settings.get("add_prefix_space") is None or bool(settings["add_prefix_space"])
    scheme = ("always" if settings.get("legacy", False) else "first") if has_space else "never"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, dropout=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(content=" ", left=1)] if has_space else [])])
    return tokenizer


def _gemma(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    unknown = str(settings.get("unk_token", "<unk>"))
    options = {"fuse_unk": True, "unk_token": unknown, "dropout": None, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


_END = "<|endoftext|>"
_OF_QWEN: dict[str, str | None] = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_OF_GPT: dict[str, str | None] = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}
_OF_GEMMA = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
_OF_COHERE: dict[str, str | None] = {
    **{f"{name}_token": f"<{name.upper()}>" for name in ("unk", "pad", "cls", "sep")},
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "mask_token": "<MASK_TOKEN>",
}
_BUILT = {
    "GPT2Tokenizer": BuiltClass(_byte_level(_bytes), _OF_GPT),
    "GPTNeoXTokenizer": BuiltClass(
        _byte_level(_bytes, normalizers.NFC()), {**_OF_GPT, "pad_token": "<|padding|>"}, drops_post_processor=True
    ),
    "CohereTokenizer": BuiltClass(_byte_level(_digits_and_bytes, normalizers.NFC()), _OF_COHERE, adds_named="posted"),
    "Qwen2Tokenizer": BuiltClass(_qwen(_QWEN2), _OF_QWEN, adds_named="special"),
    "Qwen3_5Tokenizer": BuiltClass(_qwen(_QWEN3_5), _OF_QWEN, reads_merges_file=False),
    "LlamaTokenizer": BuiltClass(
        _llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, reads_merges_file=False
    ),
    "GemmaTokenizer": BuiltClass(_gemma, _OF_GEMMA, reads_merges_file=False),
}
