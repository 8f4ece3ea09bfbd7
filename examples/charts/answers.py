"""Asks a model about charts, without mtrain: `python answers.py MODEL RECORDS`.

transformers loads the folder and answers with the likeliest token. Each question is asked twice: with its own chart,
and with that of another record, where a model that looks at the chart can only guess.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PLACEHOLDER = "<|image_pad|>"


class Reader:
    """Model that answers questions about images."""

    def __init__(self, folder: str) -> None:
        self._processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._patches = cache(lambda path: self._processor(Image.open(path), return_tensors="pt"))

    @torch.no_grad()
    def answer(self, question: str, path: Path) -> str:
        """Returns the likeliest first token of an answer."""
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        text = self._tokenizer.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
        image: Any = self._patches(path)
        features = int(image["image_grid_thw"].prod()) // self._processor.merge_size**2
        ids = self._tokenizer(text.replace(PLACEHOLDER, features * PLACEHOLDER), return_tensors="pt")["input_ids"]
        places = (ids == self._tokenizer.convert_tokens_to_ids(PLACEHOLDER)).int()
        logits = self._model(input_ids=ids, mm_token_type_ids=places, **image).logits
        return str(self._tokenizer.decode(logits[0, -1].argmax()))


def asked_in(records: Path) -> list[tuple[str, str, Path]]:
    """Returns the question, answer and chart of each turn, record by record."""
    found = []
    for line in records.read_text().splitlines():
        messages = json.loads(line)["messages"]
        chart = records.parent / messages[0]["content"][0]["path"]
        turns = zip(messages[::2], messages[1::2], strict=True)
        found += [(asked["content"][-1]["text"], said["content"], chart) for asked, said in turns]
    return found


def main() -> None:
    """Prints the answers about two charts, and how many of all are right."""
    disable_progress_bar()
    reader, turns = Reader(sys.argv[1]), asked_in(Path(sys.argv[2]))
    own = [reader.answer(question, chart) for question, _, chart in turns]
    others = [chart for _, _, chart in turns[4:] + turns[:4]]  # four questions about each chart
    guessed = [reader.answer(question, chart) for (question, _, _), chart in zip(turns, others, strict=True)]
    for (question, truth, chart), answer in list(zip(turns, own, strict=True))[:8]:
        print(f"{chart.name}  {question}  {answer!r}, and it is {truth}")
    truths = [truth for _, truth, _ in turns]
    for title, answers in (("with their own chart", own), ("with another chart", guessed)):
        right = sum(map(str.__eq__, answers, truths))
        print(f"{title}: {right} of {len(truths)} answers are right, {right / len(truths):.1%}")


if __name__ == "__main__":
    main()
