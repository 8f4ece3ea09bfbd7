"""Draws bar charts, and makes an untrained model for a laptop: `python make.py FOLDER [TRAIN HELD_OUT]`.

A chart shows the lengths of four consecutive words of a docstring of Python's standard library, and a record asks for
the bars by their colours. No chart of `held_out.jsonl` has the four lengths of one of `train.jsonl`. The model is a
Qwen3-VL of random weights, with a tokenizer trained on the questions.
"""

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "orange": "#ff7f0e"}
HIGHEST = 9
WIDTH, HEIGHT = 128, 64
"""Pixels of a chart."""
QUESTION = "How high is the {} bar?"
SPECIAL = {
    "start": "<|im_start|>",
    "end": "<|im_end|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Tokens of the chat template; those of images by their names in config.json."""
TEMPLATE = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
SIZE = 128
TEXT: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.05,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": SIZE,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1],
    "initializer_range": 0.05,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": TOWER["patch_size"],
    "temporal_patch_size": TOWER["temporal_patch_size"],
    "merge_size": TOWER["spatial_merge_size"],
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": WIDTH * HEIGHT, "longest_edge": WIDTH * HEIGHT},
}


def lengths() -> Iterator[tuple[int, ...]]:
    """Yields the lengths of four consecutive words of a docstring, where none is longer than HIGHEST."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words = re.findall("[a-z]+", (ast.get_docstring(node) or "").lower())
                counts = [len(word) for word in words]
                fours = (tuple(counts[place : place + 4]) for place in range(0, len(counts) - 3, 4))
                yield from (four for four in fours if max(four) <= HIGHEST)


def different(count: int) -> list[tuple[int, ...]]:
    """Returns the first different lengths of the library."""
    found: dict[tuple[int, ...], None] = {}
    for four in lengths():
        found[four] = None
        if len(found) == count:
            return list(found)
    sys.exit(f"error: the library has only {len(found)} different charts; ask for fewer")


def chart(heights: dict[str, int]) -> Image.Image:
    """Draws the bars from left to right."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen, width, unit = ImageDraw.Draw(image), WIDTH // len(heights), HEIGHT // (HIGHEST + 1)
    for place, (colour, height) in enumerate(heights.items()):
        left, right = place * width + 4, (place + 1) * width - 5
        pen.rectangle((left, HEIGHT - 1 - height * unit, right, HEIGHT - 1), COLOURS[colour])
    pen.line((0, HEIGHT - 1, WIDTH - 1, HEIGHT - 1), "black")
    return image


def conversation(heights: dict[str, int], colours: Sequence[str], path: str) -> list[dict[str, Any]]:
    """Asks for each bar in the order of `colours`; the first question has the chart."""
    messages: list[dict[str, Any]] = []
    for colour in colours:
        asked = [{"type": "text", "text": QUESTION.format(colour)}]
        messages.append({"role": "user", "content": asked if messages else [{"type": "image", "path": path}, *asked]})
        messages.append({"role": "assistant", "content": str(heights[colour])})
    return messages


def write_records(folder: Path, num_train: int, num_held_out: int) -> None:
    """Writes the charts as PNG files, and the records that name them."""
    draw = random.Random(0)
    drawn = different(num_train + num_held_out)
    draw.shuffle(drawn)
    (folder / "charts").mkdir(parents=True, exist_ok=True)
    parts = {"train": drawn[num_held_out:][:num_train], "held_out": drawn[:num_held_out]}
    for name, charts in parts.items():
        lines = []
        for number, four in enumerate(charts):
            heights = dict(zip(draw.sample(list(COLOURS), 4), four, strict=True))
            path = f"charts/{name}_{number:04}.png"
            chart(heights).save(folder / path)
            lines.append(json.dumps({"messages": conversation(heights, draw.sample(list(COLOURS), 4), path)}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{folder / name}.jsonl: {len(lines)} charts with 4 questions each")


def write_model(folder: Path) -> None:
    """Writes tokenizer, chat template, image processor, and a configuration with random weights."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions = [f"user\n{QUESTION.format(colour)}\nassistant\n" for colour in COLOURS]
    trained.train_from_iterator(questions, trainer)
    end = SPECIAL["end"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=end, pad_token=end, chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items() if name.endswith("_id")}
    text = TEXT | {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=TOWER, tie_word_embeddings=True, **ids)
    )
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    print(f"{folder}: a Qwen3-VL of {sum(each.numel() for each in model.parameters()):,} random parameters")


def main() -> None:
    """Writes records and model; the same Python gives the same files."""
    disable_progress_bar()
    work, *counts = sys.argv[1:]
    num_train, num_held_out = map(int, counts or (4000, 200))
    write_records(Path(work), num_train, num_held_out)
    write_model(Path(work, "untrained"))


if __name__ == "__main__":
    main()
