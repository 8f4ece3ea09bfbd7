"""Exact properties of a rollout: vocabulary, tokens that begin a text, chat template, mask."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.data import SftSection
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.data.encoding.plain import asked
from mtrain.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from mtrain.training.sampling.generate import Model
from mtrain.training.sampling.prompts import questions_of
from mtrain.verify.parity import Progress
from mtrain.verify.rollout.records import Rollout
from mtrain.verify.rollout.settings import Cause

_SHOWN = 8


class Prompts:
    """Prompt token ids by the tokenizer and chat template of a run."""

    def __init__(self, model: Model, has_texts: bool, progress: Progress) -> None:
        """Loads the configuration's tokenizer, if any; raises DataError for a bad one only if rollouts have texts."""
        self._config = config = model.config
        self._tokenizer: Tokenizer | None = None
        try:
            if config.data.tokenizer is not None:
                self._tokenizer = load_tokenizer(Path(config.data.tokenizer))
        except DataError as fault:
            if has_texts:
                raise
            progress(f"prompts are not compared with a tokenizer: {fault}")
        self._section = config.data if isinstance(config.data, SftSection) else None

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Returns the tokens that the tokenizer puts before a text."""
        return () if self._tokenizer is None else tuple(self._tokenizer.begin_ids)

    def broken(self, rollout: Rollout) -> Cause | None:
        """Returns the first exact property that the rollout violates; None if it violates none."""
        try:
            return self._broken(rollout)
        except DataError as fault:
            raise DataError(f"{rollout.source}: {fault}") from None

    def _broken(self, rollout: Rollout) -> Cause | None:
        size = self._config.model.vocab_size
        every = [*rollout.prompt_ids, *rollout.ids]
        if (most := max(every)) >= size:
            return Cause(
                "other vocabulary",
                f"token id {most} is beyond the vocabulary of {counted(size, 'token')}",
                "sample with the tokenizer of this model; padding rows of a table are not tokens",
            )
        if rollout.prompt is None or self._tokenizer is None:
            return self._without_begin(rollout) if rollout.prompt is None else None
        if isinstance(rollout.prompt, dict) and _is_answered(rollout.prompt):
            return self._broken_conversation(rollout, rollout.prompt)
        return self._compared(rollout.prompt_ids, self._ids(rollout.prompt))

    def _ids(self, prompt: str | dict[str, Any]) -> list[int]:
        """Encodes a rendered text, or renders messages with the run's template."""
        assert self._tokenizer is not None
        if isinstance(prompt, str):
            return asked(prompt, self._tokenizer, special_tokens=True)
        messages = prompt["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError("messages must be a list of objects with role and content; fix it")
        return questions_of(self._config, self._tokenizer, [prompt], None)[0].ids

    def _without_begin(self, rollout: Rollout) -> Cause | None:
        begin = list(self.begin_ids)
        if self._section is None or rollout.prompt_ids[: len(begin)] == begin:
            return None
        return _missing(begin) if self._template_begins(begin) else None

    def _template_begins(self, begin: Sequence[int]) -> bool:
        """Says whether the run's template writes the tokens that begin a text; not all do."""
        try:
            asked_ids = self._ids({"messages": [{"role": "user", "content": "?"}]})
        except (ConfigError, DataError):  # no template, or one that needs other messages
            return True
        return asked_ids[: len(begin)] == list(begin)

    def _broken_conversation(self, rollout: Rollout, record: dict[str, Any]) -> Cause | None:
        """Compares ids and mask of an answered conversation with those of a training sample."""
        assert self._tokenizer is not None
        if self._section is None:
            raise DataError("has messages, but the run's data (data.kind) are not conversations")
        sample = RecordEncoder(self._section, self._tokenizer).encode(record)
        every = [*rollout.prompt_ids, *rollout.ids]
        expected = sample.ids.tolist()
        # an answer that was cut has no end, and a template may write a line feed after it
        common = min(len(every), len(expected))
        if cause := self._compared(every[:common], expected[:common]):
            return cause
        mask = [False] * len(rollout.prompt_ids) + rollout.mask
        for position, (drawn, weight) in enumerate(zip(mask, sample.loss_weights.tolist())):
            if drawn != (weight > 0):
                source = "drawn by the model" if drawn else "not drawn"
                return Cause(
                    "other mask",
                    f"token {position} of the conversation counts as {source}, but the run's template gives it the "
                    f"weight {weight:g}",
                    "put exactly the tokens of answers into the loss: mask 1 for these, 0 for headers and tools",
                )
        return None

    def _compared(self, ids: Sequence[int], expected: Sequence[int]) -> Cause | None:
        if list(ids) == list(expected):
            return None
        begin = list(self.begin_ids)
        if begin and [*begin, *ids] == list(expected):
            return _missing(begin)
        if begin and list(ids) == [*begin, *expected]:
            return Cause(
                "doubled bos",
                f"the prompt begins with {begin}, the tokens that begin a text, twice",
                "encode the rendered template with add_special_tokens=False",
            )
        pairs = enumerate(zip(ids, expected))
        position = next((at for at, (one, other) in pairs if one != other), min(len(ids), len(expected)))
        return Cause(
            "other template",
            f"the prompt differs from the run's template at token {position}: {self._shown(ids, position)} instead of "
            f"{self._shown(expected, position)}",
            "use one chat template on both sides, with the same date, tools and switches (data.chat_template)",
        )

    def _shown(self, ids: Sequence[int], position: int) -> str:
        if position >= len(ids):
            return "its end"
        assert self._tokenizer is not None
        return repr(self._tokenizer.decode(list(ids[position : position + _SHOWN])))

    def alternatives(self, rollouts: Sequence[Rollout]) -> Mapping[str, list[list[int] | None]]:
        """Returns ids that an engine may have read instead of each prompt, by description; None: no such ids."""
        if self._tokenizer is None:
            return {}
        alternatives: dict[str, list[list[int] | None]] = {}
        for number, rollout in enumerate(rollouts):
            for name, ids in self._alternatives(rollout).items():
                if ids and ids != rollout.prompt_ids:
                    alternatives.setdefault(name, [None] * len(rollouts))[number] = ids
        return alternatives

    def _alternatives(self, rollout: Rollout) -> dict[str, list[int]]:
        assert self._tokenizer is not None
        prompt = rollout.prompt
        if prompt is None or (isinstance(prompt, dict) and _is_answered(prompt)):
            return {}
        if isinstance(prompt, str):
            return {"the text of the prompt": self._ids(prompt)}
        alternatives, messages = {"the messages in the run's template": self._ids(prompt)}, prompt["messages"]
        last = str(messages[-1].get("content", ""))
        alternatives["the last message without a template"] = asked(last, self._tokenizer)
        subsets = {
            "the messages without those of the system": [
                message for message in messages if message.get("role") != "system"
            ],
            "the last message alone": list(messages[-1:]),
        }
        for name, subset in subsets.items():
            if subset and subset != messages:
                alternatives[name] = self._ids({**prompt, "messages": subset})
        return alternatives


def _is_answered(record: dict[str, Any]) -> bool:
    """Says whether a conversation ends with an answer, and so includes the rollout."""
    messages = record["messages"]
    is_list = isinstance(messages, list) and bool(messages) and isinstance(messages[-1], dict)
    return is_list and messages[-1].get("role") == "assistant"


def _missing(begin: Sequence[int]) -> Cause:
    return Cause(
        "missing bos",
        f"the prompt does not begin with {list(begin)}, the tokens that begin every text of this model",
        "give the engine the token ids of the run's tokenizer, or encode with add_special_tokens=True",
    )
