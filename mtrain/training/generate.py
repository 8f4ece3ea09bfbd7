"""Text from a checkpoint, to look at what a run has made of it: one process, the whole prefix at every token.

Serving belongs to an inference engine; this is for the eyes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import ConfigError
from mtrain.checkpoint.store.directory import CheckpointEntry, checkpoint_at
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.config.schema.layout import LayoutSection
from mtrain.data.encoding.encoder import chat_encoder
from mtrain.mcore.distributed.groups import Groups, opened_groups
from mtrain.mcore.distributed.init import init_distributed
from mtrain.mcore.engine.optimizer import Optimizer
from mtrain.mcore.model.build import build_model, unwrap
from mtrain.mcore.model.output_layer import Logits
from mtrain.mcore.state.load import load_adapters, load_weights
from mtrain.plan.layout import Layout
from mtrain.tokenizer import Tokenizer, load_tokenizer
from mtrain.training.resume import load_base

_ALONE = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0)


class Question(NamedTuple):
    """What a model is given to continue."""

    ids: list[int]
    stop_ids: frozenset[int]
    """Each of them ends the answer."""


def question_of(config: Config, tokenizer: Tokenizer, prompt: str, as_chat: bool) -> Question:
    """Token ids of a prompt.

    Args:
        config: Of the run.
        tokenizer: That of `data.tokenizer`.
        prompt: A text to continue, or what a user says.
        as_chat: Whether the prompt is what a user says, to be written by the run's chat template.

    Raises:
        ConfigError: The run has no chat template.
        DataError: The template refuses the prompt.
    """
    if not as_chat:
        # a finetuning sample begins with the tokenizer's bos, a pretraining window anywhere
        start = [] if config.data.kind != "sft" or tokenizer.bos_id is None else [tokenizer.bos_id]
        return Question(start + tokenizer.encode(prompt), frozenset({tokenizer.eos_id}))
    encoder = chat_encoder(config.data, tokenizer) if isinstance(config.data, SftSection) else None
    if encoder is None:
        raise ConfigError(
            "the run has no chat template (data.chat_template); leave --chat out to continue the text itself"
        )
    return Question(encoder.prompt([{"role": "user", "content": prompt}]), encoder.stop_ids())


def _load(entry: CheckpointEntry, chunks: list[Any], groups: Groups, config: Config) -> None:
    """Loads a whole model, or adapters and the frozen model that they stand beside."""
    optimizer = Optimizer(config, chunks, groups)
    if entry.manifest.base is None:
        load_weights(entry, chunks, optimizer, groups, config)
    else:
        load_base(config, groups, chunks, optimizer)
        load_adapters(entry, chunks, optimizer, groups, config)


def generate_text(
    config: Config,
    checkpoint: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    as_chat: bool = False,
) -> list[str]:
    """Continues each prompt.

    Args:
        config: Of the run that wrote the checkpoint; its layout plays no role.
        checkpoint: A checkpoint directory or a run folder.
        prompts: Texts to continue, or what a user says.
        max_new_tokens: Most tokens to add; generation stops earlier at the end token.
        temperature: 0 takes the likeliest token, else logits are divided by it and sampled.
        seed: Of the sampling.
        as_chat: Whether the run's chat template writes each prompt as a question.

    Returns:
        The continuations, without prompts.

    Raises:
        ConfigError: The configuration names no tokenizer, or has no chat template and one is wanted.
        DataError: Tokenizer or checkpoint is missing or damaged.
    """
    if config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name the tokenizer that the run was trained with")
    tokenizer = load_tokenizer(Path(config.data.tokenizer))
    questions = [question_of(config, tokenizer, prompt, as_chat) for prompt in prompts]
    alone = config.model_copy(update={"layout": LayoutSection()})
    timeout_s = config.train.process_group_timeout_s
    with (
        init_distributed(_ALONE, config.train.device, timeout_s) as device,
        opened_groups(Layout(), device, seed, timeout_s) as groups,
    ):
        chunks = build_model(alone, groups)
        entry = checkpoint_at(checkpoint).entry
        assert entry is not None, "checkpoint_at raises where there is none"
        _load(entry, chunks, groups, alone)
        model = unwrap(chunks[0]).eval()
        generator = torch.Generator().manual_seed(seed)

        def next_logits(ids: Tensor) -> Tensor:
            positions = torch.arange(ids.numel(), device=device).unsqueeze(0)
            output: Logits = model(ids.unsqueeze(0).to(device), positions, None, None)
            # of the last position alone; hidden states are [seq, batch, hidden]
            logits = replace(output.main, hidden=output.main.hidden[-1:]).whole()
            # [1, 1, padded vocabulary], and padding must never be sampled
            return logits[0, 0, : config.model.vocab_size].float().cpu()

        continuations = [
            continue_ids(question.ids, next_logits, max_new_tokens, question.stop_ids, temperature, generator)
            for question in questions
        ]
    return [tokenizer.decode(ids) for ids in continuations]


@torch.no_grad()
def continue_ids(
    prompt: Sequence[int],
    next_logits: Callable[[Tensor], Tensor],
    max_new_tokens: int,
    stop_ids: Set[int],
    temperature: float,
    generator: torch.Generator,
) -> list[int]:
    """Tokens after the prompt, up to and without the end token.

    Args:
        prompt: Token ids, at least one.
        next_logits: [length] int64 -> [vocab_size] float32 logits of the next token.
        max_new_tokens: Most tokens to add.
        stop_ids: Each of them ends the text.
        temperature: 0 for the likeliest token.
        generator: Source of randomness on the CPU.
    """
    ids = list(prompt)
    for _ in range(max_new_tokens):
        logits = next_logits(torch.tensor(ids, dtype=torch.int64))
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            chosen = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if chosen in stop_ids:
            break
        ids.append(chosen)
    return ids[len(prompt) :]
