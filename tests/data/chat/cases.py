"""Templates written after the published formats, conversations, and a small tokenizer that knows their tokens."""

# ruff: noqa: RUF001 - DeepSeek writes its tokens with another bar than the others
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mtrain.core.batch.sample import TokenizedSample

TEMPLATES = Path(__file__).parent / "templates"
DAY = "2025-03-09"
SPECIAL = [
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<｜User｜>"),
    *(
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
    ),
    *(
        "<｜tool▁output▁end｜>",
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|channel|>",
        "<|message|>",
        "[gMASK]",
    ),
    *("<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens that are ordinary text to a decoder, as in Qwen3."""
ENDS = {
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gpt_oss": "<|return|>",
    "glm4": "<|endoftext|>",
}
"""Template -> eos_token; the others end with <|im_end|>."""
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}


def user(text: str) -> dict[str, Any]:
    """Returns a question."""
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    """Returns an answer."""
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("Hello, who are you?"), assistant("A small model.")]},
    "system": {
        "messages": [{"role": "system", "content": "Be brief."}, user("What is 2 + 2?"), assistant("4, of course.")]
    },
    "turns": {
        "messages": [
            *(user("Say <b>one</b>."), assistant("One 🙂 it is.")),
            *(user("  Now two\n"), assistant("Two.\n\nAnd three.")),
            *(user("Stop"), assistant("Stopped.")),
        ]
    },
    "tools": {
        "tools": [TOOL],
        "messages": [
            *(user("Is it warm in Zürich?"), assistant("", tool_calls=[CALL])),
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": '{"celsius": 21}'},
            assistant("Yes, 21 degrees."),
        ],
    },
    "tools and turns": {
        "tools": [TOOL],
        "messages": [
            *(user("Hello"), assistant("Hello to you.")),
            *(user("Is it warm in Zürich?"), assistant("", tool_calls=[CALL])),
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": "21"},
            assistant("Yes."),
        ],
    },
    "reasoning": {
        "messages": [user("What is 7 * 8?"), assistant("56", reasoning_content="7 * 8 is 7 * 7 + 7, so 56.")]
    },
    "reasoning and turns": {
        "messages": [
            *(user("What is 7 * 8?"), assistant("56", reasoning_content="7 * 8 is 7 * 7 + 7, so 56.")),
            *(user("And 7 * 9?"), assistant("63", reasoning_content="56 + 7")),
        ]
    },
    "reasoning and a call": {
        "tools": [TOOL],
        "messages": [
            user("Is it warm in Zürich?"),
            {"role": "assistant", "content": None, "reasoning_content": "I should look.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": "21"},
            assistant("Yes.", reasoning_content="21 is warm."),
        ],
    },
    "a call as text": {
        "messages": [
            user("Warm in Zürich?"),
            assistant(
                "", tool_calls=[{**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}]
            ),
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": "21"},
            assistant("Yes."),
        ],
    },
    "null content": {
        "tools": [TOOL],
        "messages": [user("Warm in Zürich?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    },
}


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE of a few merges, with the tokens of all formats."""
    model = Tokenizer(models.BPE())
    model.decoder = decoders.ByteLevel()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [json.dumps(each, ensure_ascii=False) for each in CONVERSATIONS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    model.train_from_iterator(texts * 3, trainer)
    model.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    model.save(str(folder / "tokenizer.json"))


def write_folder(folder: Path, template: str) -> None:
    """Writes a tokenizer of `write_tokenizer` and a chat template into a folder, whose turns end with <|im_end|>."""
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(template)


def folder_of(name: str, tokenizer: Path, folder: Path) -> Path:
    """Creates a tokenizer's folder with one of the templates."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "chat_template.jinja").write_bytes((TEMPLATES / f"{name}.jinja").read_bytes())
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": ENDS.get(name, "<|im_end|>"), "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def trained_texts(sample: TokenizedSample, tokenizer: Tokenizer) -> list[str]:
    """Returns the text of each run of tokens in the loss."""
    runs: list[list[int]] = []
    is_inside = False
    for id_, weight in zip(sample.ids.tolist(), sample.loss_weights.tolist()):
        if weight and not is_inside:
            runs.append([])
        is_inside = weight > 0
        if is_inside:
            runs[-1].append(id_)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
