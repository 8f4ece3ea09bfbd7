"""The class that transformers chooses for a folder, and the tokenizer that the class builds from its vocabulary.

A generic class takes tokenizer.json as it is. Others build normalizer, pre-tokenizer and model in their code, and take
only vocabulary, merges and post-processor from the file. Known ones are built in the same way here.

Source: transformers 5.24, models/auto/tokenization_auto.py (AutoTokenizer.from_pretrained) and the classes' own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.hf.tokenizer.known import CLASS_OF_MODEL, CLASSES, WRONG_CLASS

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


class NotReadError(Exception):
    """Error of a folder that transformers does not read, or by code that is not known here; says why."""


@dataclass(frozen=True)
class BuiltClass:
    """A class of transformers that builds the parts of a tokenizer itself."""

    build: Callable[[Vocabulary, Merges, Mapping[str, Any]], Any]
    """Function that makes a `tokenizers.Tokenizer` of vocabulary, merges and settings."""
    named: Mapping[str, str | None]
    """Special tokens by role where the settings name none."""
    adds_named: str | None = None
    """Way in which its code adds the named tokens once more: as "special" ones, or ("posted") as written in the
    settings; None: it does not."""
    drops_post_processor: bool = False
    """Whether its code replaces the post-processor of tokenizer.json by one that adds the tokens of the settings."""
    reads_merges_file: bool = True
    """Whether vocab.json and merges.txt are enough without a tokenizer.json."""


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], is_byte_level: bool) -> str:
    """Returns the name of the class that AutoTokenizer chooses, without `Fast`; `GENERIC` for the generic one.

    Args:
        settings: Content of tokenizer_config.json.
        config: Content of config.json; empty where there is none.
        is_byte_level: Whether tokenizer.json mentions ByteLevel.

    Raises:
        NotReadError: The class is code in the folder.
    """
    said, model = _text(settings.get("tokenizer_class")), _text(config.get("model_type"))
    named = said or _text(config.get("tokenizer_class"))
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
    if has_code and model not in WRONG_CLASS and registered is None and said not in CLASSES | _NOT_SPECIFIC:
        raise NotReadError("its tokenizer_config.json names code of its own (auto_map), which is not run")
    chosen = named or registered or GENERIC
    return chosen if chosen in CLASSES else GENERIC


def built_class(name: str) -> BuiltClass | None:
    """Returns the class that builds its parts itself; None where it takes tokenizer.json as it is.

    Raises:
        NotReadError: The class is not known here.
    """
    if name in _AS_THE_FILE_SAYS:
        return None
    if name not in _BUILT:
        raise NotReadError(f"transformers reads it by its class {name}, which is not known here")
    return _BUILT[name]


def _has_code(settings: Mapping[str, Any]) -> bool:
    code = settings.get("auto_map")
    return bool(code.get("AutoTokenizer")) if isinstance(code, dict) else bool(code)


def _text(value: object) -> str:
    return value.removesuffix("Fast") if isinstance(value, str) else ""


def _byte_level(vocabulary: Vocabulary, merges: Merges, pieces: Any, normalizer: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models

    parts = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, dropout=None, **parts))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def _gpt2(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import pre_tokenizers

    space = settings.get("add_prefix_space", False)
    return _byte_level(vocabulary, merges, pre_tokenizers.ByteLevel(add_prefix_space=space), None)


def _gpt_neox(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import normalizers, pre_tokenizers

    options = {"add_prefix_space": settings.get("add_prefix_space", False)}
    return _byte_level(vocabulary, merges, pre_tokenizers.ByteLevel(**options), normalizers.NFC())


def _cohere(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import normalizers, pre_tokenizers

    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False), trim_offsets=True)
    pieces = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    return _byte_level(vocabulary, merges, pieces, normalizers.NFC())


def _qwen(pattern: str) -> Callable[[Vocabulary, Merges, Mapping[str, Any]], Any]:
    def build(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
        from tokenizers import Regex, normalizers, pre_tokenizers

        space = settings.get("add_prefix_space")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False if space is None else space, use_regex=False)
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return _byte_level(vocabulary, merges, pre_tokenizers.Sequence([split, bytes_]), normalizers.NFC())

    return build


def _llama(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    has_space = settings.get("add_prefix_space") is None or bool(settings["add_prefix_space"])
    scheme = ("always" if settings.get("legacy", False) else "first") if has_space else "never"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, dropout=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(content=" ", left=1)] if has_space else [])])
    return tokenizer


def _gemma(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

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
_OF_COHERE = {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"} | {
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "sep_token": "<SEP>",
    "mask_token": "<MASK_TOKEN>",
}
_BUILT = {
    "GPT2Tokenizer": BuiltClass(_gpt2, _OF_GPT),
    "GPTNeoXTokenizer": BuiltClass(_gpt_neox, {**_OF_GPT, "pad_token": "<|padding|>"}, drops_post_processor=True),
    "CohereTokenizer": BuiltClass(_cohere, _OF_COHERE, adds_named="posted"),
    "Qwen2Tokenizer": BuiltClass(_qwen(_QWEN2), _OF_QWEN, adds_named="special"),
    "Qwen3_5Tokenizer": BuiltClass(_qwen(_QWEN3_5), _OF_QWEN, reads_merges_file=False),
    "LlamaTokenizer": BuiltClass(
        _llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, reads_merges_file=False
    ),
    "GemmaTokenizer": BuiltClass(_gemma, _OF_GEMMA, reads_merges_file=False),
}
