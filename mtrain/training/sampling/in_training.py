"""Sample answers of a run while it trains (`eval.*`).

They do not change the run: tokens are drawn without the random states of training, and layers are left unchanged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.config import Config
from mtrain.config.schema.train import EvalSection, ValidSection
from mtrain.convert.origin import source_of_run
from mtrain.core.engine.generation import refuse_uncachable
from mtrain.core.ranks.init import on_first_rank
from mtrain.hf.schema.files import declared_ends
from mtrain.hf.tokenizer.tokenizer import Tokenizer, tokenizer_of
from mtrain.report.metrics.jsonl import AppendedFile
from mtrain.report.metrics.sinks import Sinks
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run
from mtrain.training.evaluate import Due
from mtrain.training.sampling.generate import answer_text
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.prompts import Prompt, Question, questions_of, read_prompts, shown
from mtrain.training.sampling.sampler import Completion, generate

_log = logging.getLogger(__name__)

_SHOWN_PROMPTS, _SHOWN_CHARACTERS = 2, 60
"""Number of prompts, and characters of each text, that the console shows."""


class _Asked(NamedTuple):
    """Prompts and tokenizer, on the first rank."""

    prompts: list[Prompt]
    tokenizer: Tokenizer


class PromptSamples:
    """Prompts of a run, and the files of its answers."""

    def __init__(self, config: Config, folder: RunFolder, chunks: Sequence[Any], is_first_rank: bool) -> None:
        """Reads the prompts, on the first rank. Collective over the world.

        Raises:
            ConfigError: The model's layers cannot generate, or a chat template is wanted and the run has none.
            DataError: The tokenizer or the file of prompts is missing or damaged, or a prompt has no token.
        """
        self._section, self._folder = config.eval, folder
        self.due = _due(config.eval, config.valid)
        self._is_first_rank = is_first_rank
        self._asked: _Asked | None = None
        self._questions: list[Question] = []
        self._files = ExitStack()
        self._lines: AppendedFile | None = None
        if not self._section.is_on:
            return
        refuse_uncachable(config.model, chunks)
        self._questions = on_first_rank(lambda: self._read(config))
        stops = frozenset[int]().union(*(each.stop_ids for each in self._questions))
        given = (self._section.temperature, self._section.top_p, self._section.top_k, self._section.seed)
        self._sampling = SamplingParams(self._section.max_new_tokens, *given, stops)

    def begin(self, start_step: int) -> None:
        """Opens the files for the steps after this one, and removes what an earlier start wrote for these steps."""
        self.close()
        if not self._section.is_on or not self._is_first_rank:
            return
        _rewind(self._folder.samples, start_step)
        self._lines = AppendedFile(self._folder.samples)
        self._files.callback(self._lines.close)

    def take(self, run: Run, step: int, sinks: Sinks) -> None:
        """Answers the prompts with the current weights, and writes the answers, also to sinks that show texts.
        Collective over the world.

        Raises:
            NumericError: The logits are not finite; on all ranks.
        """
        run.model.sharded.gather_parameters()
        ids = [each.ids for each in self._questions]
        completions = generate(run.model, ids, self._sampling)
        if self._asked is not None:
            self._write(self._asked, completions, step, sinks)

    def close(self) -> None:
        """Closes the files.

        Raises:
            MachineError: A disk has refused answers, up to the last attempt.
        """
        self._files.close()
        self._lines = None

    def _read(self, config: Config) -> list[Question]:
        section, tokenizer = self._section, tokenizer_of(config)
        further = [] if section.prompts_file is None else read_prompts(Path(section.prompts_file))
        self._asked = _Asked([*section.prompts, *further], tokenizer)
        ends = declared_ends(source_of_run(config).origin)
        return questions_of(config, tokenizer, self._asked.prompts, section.chat, ends)

    def _write(self, asked: _Asked, completions: Sequence[Completion], step: int, sinks: Sinks) -> None:
        assert self._lines is not None, "`begin` goes first"
        stops, lines = self._sampling.stop_token_ids, []
        for number, (prompt, completion) in enumerate(zip(asked.prompts, completions, strict=True)):
            answer = answer_text(asked.tokenizer, completion, stops)
            record = {
                "step": step,
                "prompt": prompt,
                "answer": answer,
                "finish_reason": completion.finish_reason,
                "num_tokens": len(completion.token_ids),
                "log_prob": sum(completion.log_probs),
            }
            self._lines.append(step, (json.dumps(record, ensure_ascii=False) + "\n").encode())
            lines.append(f"> {shown(prompt)}\n{answer}")
            if number < _SHOWN_PROMPTS:
                _log.info(f"sample after step {step}: {_short(shown(prompt))} -> {_short(answer)}")
        sinks.write_text("samples", "\n\n".join(lines), step)


def _due(section: EvalSection, valid: ValidSection) -> Due:
    """Returns when prompts are answered: at intervals of their own, or with each validation."""
    if not section.is_on:
        return Due()
    if section.interval_steps is not None:
        return Due(section.interval_steps)
    return Due(valid.interval_steps, valid.at_end, valid.at_start)


def _short(text: str) -> str:
    """Shortens and escapes a text for one line: text of an untrained model may contain control characters."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…")


def _rewind(path: Path, start_step: int) -> None:
    """Rewinds the file to this step, and removes an incomplete last line; at step 0 nothing is kept.

    Raises:
        DataError: A line is damaged; the message names it.
        MachineError: The disk refuses.
    """
    if not path.exists():
        return
    with disk_faults(f"rewind {path} to step {start_step}"), replacing(path) as new:
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        kept = [line for number, line in enumerate(whole, 1) if 0 < start_step >= _step_of(path, number, line)]
        new.write_bytes(b"".join(kept))


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}, line {number} is no sample of a run; repair or remove that line") from None
