"""A run with adapters on a Hugging Face folder: its logits and its checkpoint; for `test_peft.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.api.hf_tensors import HfContent, HfTensors
from mtrain.arch.adapters import HEAD, is_learned_whole
from mtrain.checkpoint.state.load import save_checkpoint
from mtrain.config import Config
from mtrain.config.adapters import has_merged_form
from mtrain.config.load import save_config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_model, build_rank_model
from mtrain.core.engine.schedule import run_forward
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.groups import Groups
from mtrain.training.resume import initialize
from mtrain.verify.core.weights import drawn, set_weights
from tests.training.engine_parts.hf_ranks import bits_of


class Saved(NamedTuple):
    """What a rank sees of a model with drawn adapters."""

    logits: Any
    streamed: dict[HfContent, dict[str, bytes]]
    """Content -> name -> bits, as streamed to this rank."""


def saved(groups: Groups, config: Config, tokens: Any) -> Saved:
    """Draws adapters, saves them into `run.dir` as a run does, and returns the logits and all weights."""
    sharded = build_model(config, groups)
    chunks = sharded.chunks
    set_weights(chunks, groups, lambda name, shape: drawn(name, shape, config) if _is_pair(name) else None)
    model = RankModel(config, groups, sharded, Optimizer(config, sharded, groups))
    initialize(model)
    assert config.adapter is not None
    section, adapter = config.model, config.adapter

    def trained(name: str, shape: Any) -> Any:
        is_head = name == HEAD and section.num_labels is not None
        return drawn(name, shape, config) if is_learned_whole(section, adapter, name) and not is_head else None

    set_weights(chunks, groups, trained)
    model.optimizer.take_weights()
    folder = Path(config.run.dir)
    if groups.rank == 0:
        folder.mkdir(parents=True)
        save_config(config, folder / "config.yaml")
    save_checkpoint(folder / "checkpoints", model, step=1)
    contents: list[HfContent] = ["base", "adapter"]
    contents += ["merged"] if has_merged_form(config.model, config.adapter) else []
    streams = {each: HfTensors(model, each).stream(20_000, True) for each in contents}
    streamed = {each: {name: bits_of(values) for name, values in stream} for each, stream in streams.items()}
    return Saved(_logits(groups, config, chunks, tokens), streamed)


def started(groups: Groups, config: Config, tokens: Any) -> Any:
    """Returns the logits that a run begins with."""
    model = build_rank_model(config, groups)
    initialize(model)
    return _logits(groups, config, model.chunks, tokens)


def _is_pair(name: str) -> bool:
    """Says whether a parameter is a matrix of an adapter; magnitudes of DoRA, the row norms of W, are not drawn."""
    return name.endswith(("lora_a", "lora_b"))


def _logits(groups: Groups, config: Config, chunks: Sequence[Any], tokens: Any) -> Any:
    """Returns [batch, seq, vocab_local] on the last stage, as numpy; None on others."""
    ids = torch.from_numpy(tokens)
    batch = Microbatch(
        tokens=ids,
        labels=ids,
        positions=torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        weights={},
        denominator_weights={},
        document_starts=None,
        is_padding=torch.zeros_like(ids, dtype=torch.bool),
    )
    found: list[Tensor] = []

    def take(logits: Logits, batch: Microbatch) -> None:
        found.append(logits.main.whole().transpose(0, 1).clone())

    run_forward(chunks, [batch], take, config)
    dist.barrier()  # a stage that finishes first would close what the next one still reads
    return found[0].numpy() if found else None
