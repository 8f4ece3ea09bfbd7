"""Compares a checkpoint with a Hugging Face folder, by tensors or by logits."""

from pathlib import Path

import torch
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.state.load import load_frozen_weights
from mtrain.checkpoint.store.directory import CheckpointEntry, checkpoint_at
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.convert.carried import carried_in
from mtrain.convert.origin import source_of
from mtrain.convert.proof import Proof, Sides, prove
from mtrain.convert.target import exported_family, open_target
from mtrain.core.batch.batch import Microbatch
from mtrain.core.layers.build import build_frozen_model, run_chunk
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.core.ranks.init import init_distributed
from mtrain.core.ranks.party import Purpose
from mtrain.hf.io.safetensors import shown_names
from mtrain.hf.io.source import open_source
from mtrain.hf.io.training import transformers_logits
from mtrain.hf.schema.description import disagreements


def verify_hf(checkpoint: Path, hf: Path, num_workers: int) -> Proof:
    """Compares a checkpoint with a Hugging Face folder, tensor by tensor; a float32 folder with main weights."""
    source = open_source(hf)
    target = open_target(checkpoint, hf, source.dtype)
    has_vision = target.model.vision is not None
    if has_vision or (target.model.mtp_depths and not source.model.mtp_depths):
        source = open_source(hf, depths=target.model.mtp_depths, with_vision=has_vision)
    if differing := disagreements(source.model, target.model):
        shown = "; ".join(f"model.{name}={mine}, but {theirs} there" for name, theirs, mine in differing)
        raise DataError(f"{hf} has another model than {checkpoint} ({shown}); name another folder")
    target.verify(num_workers)
    origin = None if target.entry is None else source_of(target.path).origin
    carried = {} if origin is None else carried_in(origin, exported_family(target.model, origin))
    # a run that began without images may have them from --like
    if carried and (other := sorted(target.carried.keys() - carried.keys())):
        raise DataError(f"{hf} has {shown_names(other)}, but {origin} does not; name another folder")
    sides = Sides(source.table, target.tensors, source.weights, "checkpoint", target.key, carried)
    return prove(sides, num_workers)


_ALONE = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0)
_SEED, _BATCH, _SEQ, _TIMEOUT_S = 1234, 2, 64, 60.0


def compare_logits(checkpoint: Path, hf: Path) -> float:
    """Returns the largest difference of logits on random tokens, in float32, divided by the largest logit.

    Compares a float32 folder with the checkpoint's main weights, and any other with the model's weights.
    """
    entry = checkpoint_at(checkpoint).entry
    assert entry is not None, "checkpoint_at raises without one"
    model = source_of(entry.path).model
    if model.head is not None:
        raise ConfigError(
            f"--check-logits compares logits of tokens, but {entry.path} has a head ({model.head}); leave the option "
            "out, because every tensor is compared bit for bit anyway"
        )
    main = open_source(hf).dtype == torch.float32
    tokens = random_tokens(model.vocab_size)
    theirs = transformers_logits(hf, tokens)
    with (
        init_distributed(_ALONE, "cpu", _TIMEOUT_S, Purpose("convert", hf, {})) as device,
        opened_groups(Layout(), device, _SEED, _TIMEOUT_S) as groups,
    ):
        ours = our_logits(entry, model, groups, tokens, main)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def random_tokens(vocab_size: int) -> Tensor:
    """Returns the same random tokens, [batch, seq] int64, on every call."""
    return torch.randint(vocab_size, (_BATCH, _SEQ), generator=torch.Generator().manual_seed(_SEED))


@torch.no_grad()
def our_logits(entry: CheckpointEntry, model: ModelSection, groups: Groups, tokens: Tensor, main: bool) -> Tensor:
    """Computes a checkpoint's logits [batch, seq, vocab_size] in float32, in one process; `main`: from main weights."""
    config = _config(model)
    chunks = build_frozen_model(config, groups)
    load_frozen_weights(entry, chunks, groups, config.model, main)
    batch = Microbatch(
        tokens=tokens,
        labels=tokens,
        positions=torch.arange(tokens.shape[1]).expand_as(tokens),
        weights={},
        denominator_weights={},
        document_starts=None,
        is_padding=torch.zeros_like(tokens, dtype=torch.bool),
    )
    output = run_chunk(chunks[0], batch)
    assert isinstance(output, Logits), "the only stage is the last one"
    return output.main.whole().transpose(0, 1)[..., : model.vocab_size].float()


def _config(model: ModelSection) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": model.model_dump(),
            "train": {"global_batch_size": _BATCH, "num_steps": 1, "precision": "fp32", "device": "cpu"},
            "optimizer": {"lr": 1.0},
            "data": {"kind": "mock", "seq_length": _SEQ},
        }
    )
