"""Functions of ranks in the tests of conversions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.state import reader
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.checkpoint.state.load import load_frozen_weights
from mtrain.checkpoint.state.reader import load_shards
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.checkpoint.store.directory import load_entry
from mtrain.config import Config
from mtrain.convert.origin import source_of
from mtrain.convert.verifying import our_logits, random_tokens
from mtrain.core.engine.rank_model import build_rank_model
from mtrain.core.engine.sharded_model import FlatSlice
from mtrain.core.layers.build import build_frozen_model
from mtrain.core.ranks.groups import Groups
from mtrain.hf.io.source import FolderTensors
from tests.core.state.gathering import gather_whole


def logits(groups: Groups, checkpoint: Path, main: bool = True) -> Any:
    """Returns logits [batch, seq, vocab_size] of a checkpoint, as numpy."""
    model = source_of(checkpoint).model
    return our_logits(load_entry(checkpoint), model, groups, random_tokens(model.vocab_size), main).numpy()


def weights(groups: Groups, checkpoint: Path, config: Config) -> dict[str, Any]:
    """Returns all weights by global name after loading; on rank 0, else empty."""
    chunks = build_frozen_model(config, groups)
    load_frozen_weights(load_entry(checkpoint), chunks, groups, config.model)
    return gathered(chunks, groups)


def started_weights(groups: Groups, config: Config) -> dict[str, Any]:
    """Returns the weights by global name after a start from `model.hf` and an empty update, which writes the
    optimizer's main weights into the model; on rank 0, else empty."""
    model = build_rank_model(config, groups)
    assert config.model.hf is not None
    load_hf_weights(Path(config.model.hf), model)
    model.optimizer.zero_grad()
    model.optimizer.local_grad_norm_sq()
    model.optimizer.update(0.0, 0.0)
    model.sharded.gather_parameters()
    return gathered(model.chunks, groups)


class Outside(NamedTuple):
    """Memory of a start from `model.hf` apart from its parameters."""

    shards: int
    """Bytes of the shards into which tensors are read."""
    largest: int
    """Bytes of the largest parameter."""
    most: int
    """Largest number of bytes at one time of what has been read."""


def read_outside_parameters(groups: Groups, config: Config) -> Outside:
    """Measures the memory of what a start from `model.hf` reads, apart from its parameters."""
    model = build_rank_model(config, groups)
    found = Outside(0, 0, 0)

    def counted(saved: Any, shards: Any, may_be_left: Any, vocab_size: int, after_each: Any) -> None:
        nonlocal found
        inside = {parameter.untyped_storage().data_ptr() for chunk in model.chunks for parameter in chunk.parameters()}
        storages = [shard.data.untyped_storage() for shard in shards]
        is_outside = [storage.data_ptr() not in inside for storage in storages]
        sizes = [storage.nbytes() * outside for storage, outside in zip(storages, is_outside, strict=True)]
        found = Outside(sum(is_outside), max(sizes), 0)

        def after(number: int) -> None:
            nonlocal found
            after_each(number)
            read = zip(storages[: number + 1], is_outside[: number + 1], strict=True)
            left = {id(storage): storage.nbytes() for storage, outside in read if outside}
            found = found._replace(most=max(found.most, sum(left.values())))

        load_shards(saved, shards, may_be_left, vocab_size, after)

    assert config.model.hf is not None
    with mock.patch.object(reader, "load_shards", counted):
        load_hf_weights(Path(config.model.hf), model)
    return found


def reads_of_a_start(groups: Groups, config: Config) -> list[tuple[str, str, TensorSlice]]:
    """Records the calls of a start from `model.hf`: reads of the folder (read or expect, key, slice) and settings of
    main weights."""
    model = build_rank_model(config, groups)
    asked: list[tuple[str, str, TensorSlice]] = []

    def noted(name: str) -> Any:
        method = getattr(FolderTensors, name)

        def call(self: FolderTensors, key: str, wanted: TensorSlice) -> Any:
            asked.append((name, key, wanted))
            return method(self, key, wanted)

        return mock.patch.object(FolderTensors, name, call)

    set_main = FlatSlice.set_main

    def noted_set(self: FlatSlice, whole: Any) -> None:
        asked.append(("set", "", TensorSlice((), ())))
        set_main(self, whole)

    assert config.model.hf is not None
    with noted("read"), noted("expect"), mock.patch.object(FlatSlice, "set_main", noted_set):
        load_hf_weights(Path(config.model.hf), model)
    return asked


def gathered(chunks: Sequence[Any], groups: Groups) -> dict[str, Any]:
    """Gathers values by global name, as numpy; on rank 0, else empty."""
    whole = gather_whole(parameter_shards(chunks, groups)) or {}
    return {name: value.float().numpy() for name, value in whole.items()}
