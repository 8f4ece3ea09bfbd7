"""Trains a tokenizer that can spell every text.

It is a sentencepiece model, or a byte-level BPE as Hugging Face stores it: tokenizer.json, its settings and a chat
template. Only the latter has special tokens that a chat template can write.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.base.spelling import counted
from mtrain.data.formats.documents import TextFiles

_MAX_LINE_BYTES = 65536

_LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}


class ControlIds(NamedTuple):
    """Ids of special tokens of a sentencepiece model; -1 leaves one out."""

    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = 3


def train_tokenizer(
    texts: TextFiles,
    output: Path,
    vocab_size: int,
    *,
    kind: Literal["bpe", "unigram"] = "bpe",
    control: ControlIds = ControlIds(),  # noqa: B008
    overwrite: bool = False,
) -> None:
    """Writes a `.model` whose decode(encode(text)) is the text.

    Characters outside the vocabulary are spelt in bytes, white space is kept, and each digit is a token. The unknown
    token has id 0. The same inputs give the same model.
    """
    from sentencepiece import SentencePieceTrainer

    _refuse_existing(output, overwrite)
    model = io.BytesIO()
    documents = texts.documents()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(line for document in documents for line in document.split("\n") if line.strip()),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            unk_id=0,
            **control._asdict(),
            max_sentence_length=_MAX_LINE_BYTES,
            num_threads=1,  # the same inputs must give the same model, on any number of processors
            minloglevel=2,
            **_LOSSLESS,
        )
    except RuntimeError as fault:
        raise DataError(
            f"no tokenizer of {counted(vocab_size, 'token')} can be trained on this text: "
            f"{' '.join(str(fault).split())}; change the number of tokens or give more text"
        ) from fault
    with disk_faults(f"write the tokenizer {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as new:
            new.write_bytes(model.getvalue())


def _refuse_existing(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists; choose another output, or overwrite it with --overwrite")


END = "<|endoftext|>"
"""Token that ends a document and fills rows."""
CHATML = "chatml"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# Words with the space or sign before them, single digits, signs, line breaks, white space. Source: Qwen2's tokenizer.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_hf_tokenizer(
    texts: TextFiles,
    output: Path,
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder whose tokenizer spells every text in bytes: decode(encode(text)) is the text.

    The end of a document has id 0; special tokens follow it. The same inputs give the same files.

    Args:
        chat_template: Template `chatml`, which brings its special tokens, or the path of a .jinja file.
    """
    template = None if chat_template is None else _template(chat_template)
    names = [END, *(_CHATML_TOKENS if chat_template == CHATML else ()), *special_tokens]
    specials = list(dict.fromkeys(names))
    if vocab_size < (least := 256 + len(specials)):
        raise ConfigError(
            f"--vocab-size={vocab_size} does not hold 256 bytes and {counted(len(specials), 'special token')}; give at "
            f"least {least}"
        )
    files = {"tokenizer.json": "", "tokenizer_config.json": json.dumps(_settings(specials), indent=2) + "\n"}
    if template is not None:
        files["chat_template.jinja"] = template
    for name in files:
        _refuse_existing(output / name, overwrite)
    documents = texts.documents()
    files["tokenizer.json"] = _trained(documents, vocab_size, specials)
    with disk_faults(f"write the tokenizer {output}"):
        output.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with replacing(output / name) as new:
                new.write_text(content, encoding="utf-8")


def _template(name: str) -> str:
    path = Path(__file__).with_name("templates") / "chatml.jinja" if name == CHATML else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(
            f"{path} cannot be read as a chat template ({fault}); give {CHATML} or a .jinja file"
        ) from fault


def _settings(specials: Sequence[str]) -> dict[str, Any]:
    more = list(specials[1:])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END, "pad_token": END}
    return {**settings, "clean_up_tokenization_spaces": False, "additional_special_tokens": more}


def _trained(documents: Iterator[str], vocab_size: int, specials: Sequence[str]) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        # every byte, also bytes that do not occur in the text
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (size := tokenizer.get_vocab_size()) < vocab_size:
        raise DataError(
            f"no tokenizer of {counted(vocab_size, 'token')} can be trained on this text, which gives {size}; change "
            "the number of tokens or give more text"
        )
    return str(tokenizer.to_str(pretty=True))
