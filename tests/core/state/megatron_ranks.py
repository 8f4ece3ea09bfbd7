"""Checkpoints as Megatron-LM writes them, by megatron-core's own models and writer; the functions for `Pool.run`."""

from __future__ import annotations

import argparse
import multiprocessing
import queue
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import functional

from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.runs.folder import RunFolder
from mtrain.training.resume import Progress, resume_or_initialize
from tests.core.state.checkpoint_ranks import build
from tests.core.state.gathering import gather_whole
from tests.known_issues.expert_ranks import with_their_router
from tests.known_issues.plain import plain_config

ITERATION = 100


def save_like_megatron_lm(groups: Groups, config: Config, folder: Path, prefix: str, stacked: bool) -> float:
    """Writes iter_0000100 of a newly drawn GPTModel and its tracker file; returns the model's loss on the first batch.

    Args:
        groups: One pipeline stage.
        config: Our configuration of the same model.
        folder: Folder of the checkpoints.
        prefix: Prefix of all keys.
        stacked: Whether all layers are one tensor.
    """
    model = _model(groups, config)
    weights: Any = model.sharded_state_dict(prefix=prefix, metadata={"non_homogeneous_layers": not stacked})
    state = {
        "args": argparse.Namespace(num_layers=config.model.num_layers),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": weights,
        "rng_state": ShardedObject(
            "rng_state", [torch.get_rng_state()], (groups.layout.world_size,), (groups.rank,), replica_id=0
        ),
    }
    target = folder / f"iter_{ITERATION:07d}"
    if groups.rank == 0:
        target.mkdir(parents=True)
    torch.distributed.barrier()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it starts processes
    # theirs lies in a process of its own, an interpreter that imports everything anew; nobody else writes here
    vars(filesystem_async)["_results_queue"] = queue.Queue()
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), groups.dp_cp)
    dist_checkpointing.save(state, str(target), strategy)
    if groups.rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return _loss(model, config)


def _model(groups: Groups, config: Config) -> GPTModel:
    model, experts, fields = config.model, config.model.experts, dict[str, Any]()
    if experts is not None:
        fields = {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.top_k,
            "moe_router_pre_softmax": experts.pre_softmax,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": groups.layout.ep,
        }
    translated: TransformerConfig = plain_config(groups, model, fields | {"qk_layernorm": model.qk_norm})
    torch.manual_seed(7)
    built = GPTModel(
        config=translated,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=None if experts is None else experts.num_experts,
            moe_grouped_gemm=False,
            qk_layernorm=model.qk_norm,
            normalization="RMSNorm",
        ),
        vocab_size=-(-model.vocab_size // 64) * 64,
        max_sequence_length=64,
        parallel_output=False,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(model.rope.base),
        pg_collection=groups.collection,
    )
    for name, parameter in built.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return built


@torch.no_grad()
def _loss(model: GPTModel, config: Config) -> float:
    """Returns the mean loss over the tokens of the first global batch, without vocabulary padding; in nats."""
    numerator = denominator = 0.0
    for batch in StepLoader(config, 0, 1).batches(0):
        with with_their_router():
            logits = model(batch.tokens, batch.positions, None)[..., : config.model.vocab_size]
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        weights = batch.weights["main"].flatten()
        numerator, denominator = numerator + float((losses * weights).sum()), denominator + float(weights.sum())
    return numerator / denominator


def tensors_by_megatron(groups: Groups, folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a checkpoint as megatron-core's own reader finds it."""
    # not by its load_tensors_metadata, which fails with torch 2.15
    facts = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(fact.size, dtype=fact.properties.dtype))
        for key, fact in facts.items()
        if isinstance(fact, TensorStorageMetadata)
    }
    loaded = dist_checkpointing.load(dict(wanted), str(folder))
    return {key: loaded[key] for key in wanted}


def foreign_weights(groups: Groups, config: Config, folder: Path) -> dict[str, torch.Tensor] | None:
    """Returns our model's global tensors by name, on rank 0."""
    parts = build(groups, config)
    resume_or_initialize(parts.model, RunFolder(folder / "run"), None)
    return gather_whole(parameter_shards(parts.model.chunks, groups))


def loss_from_foreign_weights(groups: Groups, config: Config, folder: Path) -> float:
    """Returns our model's loss on the same batch."""
    parts = build(groups, config)
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp) if groups.tp_rank == 0 else None
    found = resume_or_initialize(parts.model, RunFolder(folder / "run"), loader)
    assert found == Progress(0)
    whole = gather_whole(parameter_shards(parts.model.chunks, groups))
    assert whole is None or not whole["embedding.word_embeddings.weight"][config.model.vocab_size :].any()
    return parts.training.forward_backward(None if loader is None else loader.batches(0)).loss
