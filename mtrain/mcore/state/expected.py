"""Whether a checkpoint holds the weights of a model, without building it."""

from __future__ import annotations

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.config import Config
from mtrain.hf.schema.exportable import family_of_run
from mtrain.mcore.state.load import Naming, check_entry
from mtrain.mcore.state.reader import check_keys, check_shapes
from mtrain.plan.parameters import padded_vocab_size

_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Have a row for each token, and more as padding."""


def check_weights(entry: CheckpointEntry, config: Config) -> None:
    """Compares names and shapes, as a run that starts from the checkpoint does; no tensor is read.

    Of a model that no family of Hugging Face describes, and of one with a head, the vocabulary alone.

    Args:
        entry: The checkpoint.
        config: Of the run.

    Raises:
        DataError: The checkpoint is damaged, or of another model.
    """
    check_entry(entry, config)
    saved = CheckpointTensors(entry.path)
    shapes = None if config.model.num_labels is not None else _shapes(config)
    if shapes is None:
        return
    naming = Naming(saved, main=True)
    wanted = {naming.key_of(key): shape for key, shape in shapes.items()}
    check_keys(saved, wanted.keys(), naming.may_be_left)
    padded = {naming.key_of(key) for key in _TABLES}
    check_shapes(saved, wanted, padded, config.model.vocab_size)


def _shapes(config: Config) -> dict[str, Sizes] | None:
    """Global name -> shape of every parameter."""
    model = config.model
    try:
        shapes = family_of_run(config).table(model).shapes
    except DataError:
        return None
    rows = padded_vocab_size(model, config.layout.tp)
    return {key: (rows, *shape[1:]) if key in _TABLES else shape for key, shape in shapes.items()}
