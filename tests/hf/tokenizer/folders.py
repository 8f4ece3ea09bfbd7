"""Folders of small tokenizers, with tokens declared at drawn places."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "the reader of an index, and the writer",
    "  two  spaces\nand lines\n",
    "naïve résumé 日本 12 345",
    "It's <|x|> [y]",
] * 4
NAMES = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<tool>", "<extra>", "<|endoftext|>"]
KINDS = ("byte_level", "metaspace", "gemma_like", "unigram", "wordpiece")
CLASSES = (
    *("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "NoSuchTokenizer", "BloomTokenizerFast"),
    *("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
    *("GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "CohereTokenizerFast", "Qwen3_5Tokenizer"),
)
MODEL_TYPES = (None, None, "llama", "qwen2", "qwen3", "gemma2", "mistral", "olmo", "phi3", "cohere", "no_such_model")


@cache
def trained(kind: str, num_known: int) -> str:
    """Returns JSON of a tokenizer whose vocabulary holds the first of `NAMES`."""
    special = NAMES[:num_known]
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind in ("metaspace", "gemma_like"):
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if kind == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        trainer = trainers.BpeTrainer(
            vocab_size=120, special_tokens=[*special, *(f"<0x{n:02X}>" for n in range(8, 14))]
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=100, special_tokens=special, unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special)
    tokenizer.train_from_iterator(TEXT, trainer)
    return str(tokenizer.to_str())


@st.composite
def added_tokens(draw: st.DrawFn) -> dict[str, Any]:
    flags = {flag: draw(st.booleans()) for flag in ("lstrip", "rstrip", "normalized", "special", "single_word")}
    return {"content": draw(st.sampled_from(NAMES)), **flags}


@st.composite
def other_files(draw: st.DrawFn) -> dict[str, Any]:
    """Draws config.json and special_tokens_map.json, or neither."""
    files: dict[str, Any] = {}
    name = st.sampled_from(NAMES)
    if (model_type := draw(st.sampled_from(MODEL_TYPES))) is not None:
        files["config.json"] = {"model_type": model_type}
    if draw(st.booleans()):
        files["special_tokens_map.json"] = draw(
            st.fixed_dictionaries(
                {"eos_token": st.one_of(name, added_tokens())},
                optional={"bos_token": name, "additional_special_tokens": st.lists(name, max_size=2)},
            )
        )
    return files


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the files of a tokenizer's folder: file -> content."""
    kind = draw(st.sampled_from(KINDS))
    content = json.loads(trained(kind, draw(st.integers(3, 6))))
    model = Tokenizer.from_str(json.dumps(content))
    model.add_tokens([AddedToken(**each) for each in draw(st.lists(added_tokens(), max_size=3))])
    match draw(st.sampled_from(["none", "template", "byte_level", "bert"])):
        case "template":
            model.post_processor = processors.TemplateProcessing(
                single="<s> $A" if draw(st.booleans()) else "$A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            )
        case "byte_level":
            model.post_processor = processors.ByteLevel(trim_offsets=False)
        case "bert":
            model.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    content = json.loads(model.to_str())
    size = len(model.get_vocab())
    name = st.sampled_from(NAMES)
    as_object = added_tokens().map(lambda each: {"__type": "AddedToken", **each})
    token = st.one_of(name, as_object)
    settings: dict[str, Any] = {"eos_token": draw(st.one_of(st.sampled_from(NAMES[:3]), token))}
    if draw(st.integers(0, 4)) == 0 and "padding" in content:
        content["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None} | {
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": draw(st.sampled_from(NAMES)),
        }
    roles = ("bos_token", "pad_token", "unk_token", "image_token")
    settings |= draw(st.fixed_dictionaries({}, optional={role: st.one_of(st.none(), token) for role in roles}))
    flags = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "clean_up_tokenization_spaces")
    settings |= draw(st.fixed_dictionaries({}, optional={flag: st.booleans() for flag in flags}))
    settings |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "tokenizer_class": st.sampled_from(CLASSES),
                "additional_special_tokens": st.lists(token, max_size=2),
                "extra_special_tokens": st.one_of(st.lists(name, max_size=2), st.just({"boi_token": "<extra>"})),
                "added_tokens_decoder": st.dictionaries(st.integers(0, size + 2).map(str), added_tokens(), max_size=3),
            },
        )
    )
    files = {"tokenizer.json": content, "tokenizer_config.json": settings, **draw(other_files())}
    if draw(st.booleans()):
        files["added_tokens.json"] = {
            text: size + place for place, text in enumerate(draw(st.lists(name, unique=True, max_size=2)))
        }
    if kind == "byte_level" and draw(st.integers(0, 3)) == 0:
        del files["tokenizer.json"]
        files["vocab.json"] = content["model"]["vocab"]
        merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
        files["merges.txt"] = "#version: 0.2\n" + "\n".join(merges) + "\n"
    return files


def written(files: dict[str, Any], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return folder
