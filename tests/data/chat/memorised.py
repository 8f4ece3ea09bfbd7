"""A model that has learned a sample by heart: after each beginning of it, the token that is in the loss there.

It stands for any model that was trained to a loss of zero, and says what such a model answers when it is asked.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import numpy as np

from mtrain.core.batch.sample import TokenizedSample


class Memorised:
    """The model, and which of its tokens it was ever asked for."""

    def __init__(self, sample: TokenizedSample) -> None:
        self._ids = sample.ids.tolist()
        places = np.flatnonzero(sample.loss_weights).tolist()
        self._next = {tuple(self._ids[:place]): self._ids[place] for place in places}
        self.unasked = set(places)
        """Places of tokens in the loss that no answer held so far."""

    def seen(self, prompt: list[int], judge: Any, stops: Set[int]) -> list[int]:
        """Returns the beginning of the sample that differs from a prompt in empty thoughts alone; the prompt itself
        where there is none."""
        if self._ids[: len(prompt)] == prompt:
            return prompt
        wanted = _squeezed(judge.decode(prompt))
        begins = [each for each in self._next if each[:-1] not in self._next or each[-1] in stops]
        found = (list(each) for each in begins if _squeezed(judge.decode(list(each))) == wanted)
        return min(found, key=len, default=prompt)

    def generate(self, prompt: list[int], stops: Set[int]) -> list[int] | None:
        """Answers greedily up to a stop; None where it would say what it has never learned."""
        said: list[int] = []
        while not said or said[-1] not in stops:
            place = len(prompt) + len(said)
            following = self._next.get((*prompt, *said))
            if following is None:
                return None
            said.append(following)
            self.unasked.discard(place)
        return said


_EMPTY = re.compile(r"<think>\s*</think>|<\|channel>thought\s*<channel\|>|\[THINK\]\[/THINK\]|\s")


def _squeezed(text: str) -> str:
    return _EMPTY.sub("", text)


def faults(sample: TokenizedSample, record: dict[str, Any], judge: Any, stops: Set[int]) -> list[str]:
    """Asks for each answer of a conversation, as transformers asks; returns what is wrong with what the model says.

    Args:
        sample: Sample of the conversation.
        record: The conversation; every answer is in the loss.
        judge: Tokenizer of transformers with the chat template.
        stops: Tokens at which generation ends.
    """
    model, found = Memorised(sample), []
    messages, switches = record["messages"], record.get("chat_template_kwargs", {})
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = judge.apply_chat_template(
            messages[:number], tools=record.get("tools"), add_generation_prompt=True, return_dict=False, **switches
        )
        said = model.generate(model.seen(prompt, judge, stops), stops)
        if said is None:
            found.append(f"messages[{number}] never stops, or is asked for otherwise")
            continue
        text = judge.decode(said)
        own = [message.get("content") or "", message.get("reasoning_content", "")]
        own += [call["function"]["name"] for call in message.get("tool_calls", ())]
        if any(text.count(each) < own.count(each) for each in own):
            found.append(f"messages[{number}] is cut to {text!r}")
    if model.unasked:
        rest = judge.decode([sample.ids.tolist()[place] for place in sorted(model.unasked)])
        found.append(f"{rest!r} is in the loss behind or before an answer")
    return found
