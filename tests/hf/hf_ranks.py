"""What ranks do in the tests of conversions."""

from pathlib import Path
from typing import Any
from unittest import mock

from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.store.directory import load_entry
from mtrain.config import Config
from mtrain.convert.logits import our_logits, random_tokens
from mtrain.convert.origin import source_of
from mtrain.hf.io.source import FolderTensors
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.optimizer import Optimizer
from mtrain.mcore.model.build import build_frozen_model, build_model
from mtrain.mcore.state import load
from mtrain.mcore.state.gather import gather_whole, parameter_shards
from mtrain.mcore.state.import_hf import load_hf_weights
from mtrain.mcore.state.load import load_frozen_weights
from mtrain.mcore.state.reader import load_shards


def logits(groups: Groups, checkpoint: Path, main: bool = True) -> Any:
    """[batch, seq, vocab_size] of a checkpoint, as numpy."""
    model = source_of(checkpoint).model
    return our_logits(load_entry(checkpoint), model, groups, random_tokens(model.vocab_size), main).numpy()


def weights(groups: Groups, checkpoint: Path, config: Config) -> dict[str, Any]:
    """All weights by global name after loading; on rank 0, else empty."""
    chunks = build_frozen_model(config, groups)
    load_frozen_weights(load_entry(checkpoint), chunks, groups, config)
    return gathered(chunks, groups)


def started_weights(groups: Groups, config: Config) -> dict[str, Any]:
    """Weights by global name after a start from `model.hf` and an update by nothing, which writes the optimizer's
    main weights into the model; on rank 0, else empty."""
    chunks = build_model(config, groups)
    optimizer = Optimizer(config, chunks, groups)
    assert config.model.hf is not None
    load_hf_weights(Path(config.model.hf), chunks, optimizer, groups, config)
    optimizer.zero_grad()
    optimizer.local_grad_norm_sq()
    optimizer.update(0.0, 0.0)
    optimizer.gather_parameters()
    return gathered(chunks, groups)


def shards_beside_parameters(groups: Groups, config: Config) -> int:
    """How many shards a start from `model.hf` reads into memory that is not their parameter's."""
    chunks = build_model(config, groups)
    outside = 0

    def counted(saved: Any, shards: Any, *rest: Any) -> None:
        nonlocal outside
        inside = {parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()}
        outside += sum(shard.data.untyped_storage().data_ptr() not in inside for shard in shards)
        load_shards(saved, shards, *rest)

    assert config.model.hf is not None
    with mock.patch.object(load, "load_shards", counted):
        load_hf_weights(Path(config.model.hf), chunks, Optimizer(config, chunks, groups), groups, config)
    return outside


def reads_of_a_start(groups: Groups, config: Config) -> list[tuple[str, str, TensorSlice]]:
    """What a start from `model.hf` asks of the folder, in turn: read or expect, key, slice."""
    chunks = build_model(config, groups)
    asked: list[tuple[str, str, TensorSlice]] = []

    def noted(name: str) -> Any:
        method = getattr(FolderTensors, name)

        def call(self: FolderTensors, key: str, wanted: TensorSlice) -> Any:
            asked.append((name, key, wanted))
            return method(self, key, wanted)

        return mock.patch.object(FolderTensors, name, call)

    assert config.model.hf is not None
    with noted("read"), noted("expect"):
        load_hf_weights(Path(config.model.hf), chunks, Optimizer(config, chunks, groups), groups, config)
    return asked


def gathered(chunks: list[Any], groups: Groups) -> dict[str, Any]:
    """Global name -> values, as numpy; on rank 0, else empty."""
    whole = gather_whole(parameter_shards(chunks, groups)) or {}
    return {name: value.float().numpy() for name, value in whole.items()}
