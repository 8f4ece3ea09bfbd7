"""Text from a checkpoint, to look at what a run has made of it: one process, the whole prefix at every token.

Serving belongs to an inference engine; this is for the eyes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import ConfigError
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.config import Config
from mtrain.config.schema.layout import LayoutSection
from mtrain.mcore.distributed.groups import opened_groups
from mtrain.mcore.distributed.init import init_distributed
from mtrain.mcore.engine.optimizer import Optimizer
from mtrain.mcore.model.build import build_model, unwrap
from mtrain.mcore.model.output_layer import Logits
from mtrain.mcore.state.load import load_weights
from mtrain.plan.layout import Layout
from mtrain.tokenizer import load_tokenizer

_ALONE = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0)


def generate_text(
    config: Config, checkpoint: Path, prompts: Sequence[str], max_new_tokens: int, temperature: float, seed: int
) -> list[str]:
    """Continues each prompt.

    Args:
        config: Of the run that wrote the checkpoint; its layout plays no role.
        checkpoint: A checkpoint directory or a run folder.
        prompts: Texts to continue.
        max_new_tokens: Most tokens to add; generation stops earlier at the end token.
        temperature: 0 takes the likeliest token, else logits are divided by it and sampled.
        seed: Of the sampling.

    Returns:
        The continuations, without prompts.

    Raises:
        ConfigError: The configuration names no tokenizer.
        DataError: Tokenizer or checkpoint is missing or damaged.
    """
    if config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name the tokenizer that the run was trained with")
    tokenizer = load_tokenizer(Path(config.data.tokenizer))
    alone = config.model_copy(update={"layout": LayoutSection()})
    timeout_s = config.train.process_group_timeout_s
    with (
        init_distributed(_ALONE, config.train.device, timeout_s) as device,
        opened_groups(Layout(), device, seed, timeout_s) as groups,
    ):
        chunks = build_model(alone, groups)
        entry = checkpoint_at(checkpoint).entry
        assert entry is not None, "checkpoint_at raises where there is none"
        load_weights(entry, chunks, Optimizer(alone, chunks, groups), groups, alone)
        model = unwrap(chunks[0]).eval()
        generator = torch.Generator().manual_seed(seed)

        def next_logits(ids: Tensor) -> Tensor:
            positions = torch.arange(ids.numel(), device=device).unsqueeze(0)
            output: Logits = model(ids.unsqueeze(0).to(device), positions, None, None)
            # of the last position alone; hidden states are [seq, batch, hidden]
            logits = replace(output.main, hidden=output.main.hidden[-1:]).whole()
            # [1, 1, padded vocabulary], and padding must never be sampled
            return logits[0, 0, : config.model.vocab_size].float().cpu()

        # a finetuning sample begins with the tokenizer's bos, a pretraining window anywhere
        start = [] if config.data.kind != "sft" or tokenizer.bos_id is None else [tokenizer.bos_id]
        eos_id = tokenizer.eos_id
        continuations = [
            continue_ids(start + tokenizer.encode(prompt), next_logits, max_new_tokens, eos_id, temperature, generator)
            for prompt in prompts
        ]
    return [tokenizer.decode(ids) for ids in continuations]


@torch.no_grad()
def continue_ids(
    prompt: Sequence[int],
    next_logits: Callable[[Tensor], Tensor],
    max_new_tokens: int,
    eos_id: int,
    temperature: float,
    generator: torch.Generator,
) -> list[int]:
    """Tokens after the prompt, up to and without the end token.

    Args:
        prompt: Token ids, at least one.
        next_logits: [length] int64 -> [vocab_size] float32 logits of the next token.
        max_new_tokens: Most tokens to add.
        eos_id: Ends the text.
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
        if chosen == eos_id:
            break
        ids.append(chosen)
    return ids[len(prompt) :]
