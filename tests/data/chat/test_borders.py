"""Tokens at the border of prompt and answer: what a model is asked with is the beginning of what it has learned."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mtrain.base.errors import DataError
from mtrain.data.chat.encoder import ChatEncoder, ChatOptions
from mtrain.data.chat.template import chosen_templates
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import assistant, user

END, SPECIAL = "<|im_end|>", ["<|im_end|>", "<|role|>", "<s>"]
CORPUS = [
    "Answer: yes",
    "### assistant\n\n\n",
    "assistant\n\n",
    "no  \n yes\n\n",
    ":\n\n:  ",
    "  Answer:  no",
    "a\n\n\nb",
]
CORPUS += [
    f"{one}{space}{other}" for one in ("yes", "no", ":", ".") for space in (" ", "  ", "\n\n") for other in "ya.:"
]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen split a text."""
SPACES = ["", "", " ", "\n", "\n\n", " \n", "  "]
HEADERS = ["assistant\n", "assistant\n\n", "Answer:", "Answer: ", "Answer:\n", "", "\n"]


def bytes_of(split: str | None) -> Tokenizer:
    """Returns a byte-level BPE, whose text is split as in GPT-2, or by a pattern."""
    model = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    model.pre_tokenizer, model.decoder = pre_tokenizers.Sequence([*parts, as_bytes]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    model.train_from_iterator(CORPUS * 4, trainer)
    return model


def pieces(kind: str) -> Tokenizer:
    """Returns a tokenizer as sentencepiece makes them, of merges or of a unigram model; Gemma's has no splits."""
    model = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    if kind == "gemma":
        model.normalizer = normalizers.Replace(" ", "▁")
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "merges" else "always")
    model.decoder = decoders.Replace("▁", " ")
    named: dict[str, Any] = {"special_tokens": ["<unk>", *SPECIAL], "show_progress": False, "vocab_size": 120}
    named["initial_alphabet"] = sorted({*"".join(CORPUS), *"▁Qzu"} - {" "})
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **named) if kind == "unigram" else trainers.BpeTrainer(**named)
    model.train_from_iterator(CORPUS * 4, trainer)
    return model


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": partial(bytes_of, None),
    "llama3": partial(bytes_of, SPLIT),
    **{kind: partial(pieces, kind) for kind in ("merges", "unigram", "gemma")},
}


def template(header: str, close: str, is_trimmed: bool, is_marked: bool) -> str:
    """Returns a template whose answers have a header of ordinary text."""
    content = "{{ m.content | trim }}" if is_trimmed else "{{ m.content }}"
    answer = f"{content}{{{{ {close!r} }}}}"
    begin, end = ("{% generation %}", "{% endgeneration %}") if is_marked else ("", "")
    opened = f"{{{{ {'<|role|>' + header!r} }}}}"
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{opened}{begin}{answer}{end}{{% else %}}<|role|>Q: {answer}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opened}{{% endif %}}"
    )


def text(draw: random.Random) -> str:
    """Draws a text with white space at its borders."""
    words = [draw.choice(["yes", "no", "Answer", "a", ":", ".", "z"]) for _ in range(draw.randint(1, 3))]
    return draw.choice(SPACES) + draw.choice([" ", "\n"]).join(words) + draw.choice(SPACES)


@pytest.mark.parametrize(
    "kind",  # merges by day: those of gpt2 and llama3
    [pytest.param(each, marks=[pytest.mark.nightly] if each in ("merges", "gemma") else []) for each in KINDS],
)
def test_a_prompt_is_the_beginning_of_what_was_learned_or_the_answer_is_refused(kind: str, tmp_path: Path) -> None:
    draw, model = random.Random(kind), KINDS[kind]()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": "<s>"}))
    outcomes = []
    for _ in range(5):
        close = END + draw.choice(["", "\n", "\n\n"])
        written = template(draw.choice(HEADERS), close, draw.random() < 0.2, draw.random() < 0.3)
        (tmp_path / "chat_template.jinja").write_text(written)
        tokenizer = load_tokenizer(tmp_path)
        templates = chosen_templates("auto", tokenizer.path)
        assert templates is not None
        encoder = ChatEncoder(templates, tokenizer, ChatOptions())
        judge = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.path), eos_token=END, chat_template=written)
        for _ in range(10):
            messages = [each for _ in range(draw.randint(1, 3)) for each in (user(text(draw)), assistant(text(draw)))]
            outcomes.append(is_taken(encoder, messages, judge))
        if kind in ("gpt2", "llama3"):  # others cannot tell text from the token
            messages[0]["content"] += END  # text, which transformers would take for the token
            is_taken(encoder, messages, None)
    assert outcomes.count(True) > 5
    assert outcomes.count(False) > 5


def is_taken(encoder: ChatEncoder, messages: list[dict[str, Any]], judge: PreTrainedTokenizerFast | None) -> bool:
    """Says whether a conversation is taken, after a comparison with the prompts and the ids of transformers."""
    begins = [messages[:number] for number in range(1, len(messages), 2)]
    prompts = [encoder.prompt({"messages": each}).ids for each in begins]
    if judge is not None:
        whole = judge.apply_chat_template(messages, return_dict=False)
        asked = [judge.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in begins]
        assert prompts == asked
    refusal, sample = None, None
    try:
        sample = encoder.encode({"messages": messages})
    except DataError as fault:
        refusal = str(fault)
    if sample is None:
        assert "would not see" in str(refusal)
        assert judge is None or any(whole[: len(prompt)] != prompt for prompt in prompts), (messages, refusal)
        return False
    ids, is_learned = sample.ids.tolist(), (sample.loss_weights > 0).tolist()
    assert judge is None or ids == whole
    for prompt in prompts:
        assert ids[: len(prompt)] == prompt, messages
        assert is_learned[len(prompt) - 1 : len(prompt) + 1] == [False, True], "the answer begins after the prompt"
    return True
