"""Exports an adapter checkpoint as a PEFT folder, for servers that load the frozen model themselves."""

import json
import logging
import re
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.tensor_slice import TensorSlice
from mtrain.base.version import __version__
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import CheckpointEntry, checkpoint_at, reading, verify_files
from mtrain.checkpoint.store.manifest import CONFIG_NAME
from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection
from mtrain.convert.endings import put_ending
from mtrain.convert.origin import put_side_files, source_of
from mtrain.convert.proof import Proof
from mtrain.convert.work import working_folder
from mtrain.hf.configuration import load_config
from mtrain.hf.io.peft import to_peft
from mtrain.hf.io.safetensors import SafetensorsFile, header_of, raw_bytes, same_bits, shown_names
from mtrain.hf.schema import peft
from mtrain.hf.schema.registry import family_of_run
from mtrain.hf.tokenizer.tokenizer import added_by

_log = logging.getLogger(__name__)

_MAIN = "optimizer.state.param."
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_STACKED_EXPERTS = ".mlp.experts.experts."


class SavedAdapter(NamedTuple):
    entry: CheckpointEntry
    config: Config
    """Configuration of the run that saved it."""
    adapter: AdapterSection
    tensors: CheckpointTensors
    main: bool
    """Whether to prefer float32 main weights if the checkpoint has them."""

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor by its global name, with the numbers of layer and expert; `{E}` means all experts."""
        layer = _LAYER.search(name)
        spelled = name.replace(".mlp.experts.{E}.", _STACKED_EXPERTS)
        expert = _EXPERT.search(spelled)
        if expert is not None:
            spelled = spelled.replace(expert[0], _STACKED_EXPERTS)
        key, indices = spelled, []
        if layer is not None and self._key(key) not in self.tensors.tensors:
            key, indices = spelled.replace(layer[0], ".layers."), [int(layer[1])]  # all layers in one tensor
        key = self._key(key)
        if key not in self.tensors.tensors:
            raise DataError(f"{self.entry.path} lacks {name}, which its configuration names; restore the checkpoint")
        indices += [] if expert is None else [int(expert[1])]
        shape = self.tensors.tensors[key].shape[len(indices) :]
        region = TensorSlice((*indices, *[0] * len(shape)), (*[1] * len(indices), *shape))
        return self.tensors.read(key, region).reshape(shape)

    def _key(self, key: str) -> str:
        return main_key(self.tensors.tensors, key) if self.main else key


def main_key(tensors: Container[str], key: str) -> str:
    """Returns the key of a tensor's float32 main weights if the checkpoint has them, else `key`."""
    return _MAIN + key if _MAIN + key in tensors else key


def open_adapter(path: Path, dtype: torch.dtype | None) -> SavedAdapter:
    """Opens an adapter checkpoint; a `dtype` of float32 prefers main weights."""
    entry = checkpoint_at(path).entry
    assert entry is not None, "checkpoint_at raises without one"
    config = load_config([entry.path / CONFIG_NAME], [])
    if entry.manifest.base is None or config.adapter is None:
        raise DataError(f"{entry.path} contains a whole model and no adapter; leave --adapter out")
    tensors = CheckpointTensors(entry.path)
    return SavedAdapter(entry, config, config.adapter, tensors, dtype == torch.float32)


def export_adapter(path: Path, out: Path, dtype: torch.dtype | None) -> Proof:
    """Writes a PEFT folder, and reads its tensors back to compare them; `dtype` None keeps the checkpoint's."""
    saved = open_adapter(path, dtype)
    family, model = family_of_run(saved.config), saved.config.model
    has_new_rows = any(added_by(model))
    if has_new_rows and "embedding" not in saved.adapter.modules_to_save:
        raise DataError(
            f"{path} was trained with model.add_tokens, and the frozen model of a PEFT folder has no rows for these "
            "tokens; leave --adapter out to merge the adapter into a model"
        )
    named = list(peft.tensors(family, model, saved.adapter))
    conversion = {"program": __version__, "source": str(saved.entry.path.resolve()), "dtype": str(dtype)}
    with reading(saved.entry), working_folder(out, conversion) as folder:
        verify_files(saved.entry, saved.entry.manifest.files, 1)
        tensors = {target.name: peft_tensor(target, saved.tensor(target.key)) for target in named}  # small enough
        if dtype is not None:
            tensors = {name: values.to(dtype) for name, values in tensors.items()}
        with disk_faults(f"write {folder}"), (folder / peft.TENSORS_NAME).open("wb") as file:
            facts = {name: (values.dtype, tuple(values.shape)) for name, values in tensors.items()}
            file.write(header_of(facts, _METADATA))
            for values in tensors.values():
                file.write(raw_bytes(values))
        content = peft.config_of(family, model, saved.adapter, model.hf)
        with disk_faults(f"write {folder}"):
            write_atomically(folder / peft.CONFIG_NAME, json.dumps(content, indent=2, sort_keys=True) + "\n")
            # a server must format conversations as in training, even for an adapter
            source = source_of(saved.entry.path)
            chats = put_side_files(
                folder, saved.entry.path, source.origin, source.tokenizer, added_by(model), but=_OF_MODELS
            )
            ending = put_ending(folder, source.origin, model) if chats else None
        written = SafetensorsFile(folder / peft.TENSORS_NAME)
        differing = [name for name, values in tensors.items() if not same_bits(values, written.tensor(name))]
        if differing:
            raise DataError(f"{folder} differs from what was written: {shown_names(differing)}; check the disk")
    if ending is not None and ending.is_new:
        _log.info(_ENDS_APART.format(ids=ending.ids, folder=str(out)))
    if has_new_rows:
        _log.info(_RESIZED.format(rows=model.vocab_size))
    return Proof(len(tensors), sum(values.nbytes for values in tensors.values()))


_METADATA = {"format": "pt"}
_OF_MODELS = ("README.md", "generation_config.json")
"""Files that describe a whole model."""
# PEFT cannot express it, and transformers reads generation_config.json from the frozen model's folder
_ENDS_APART = (
    "note: answers end with the tokens {ids}, which the frozen model's generation_config.json does not list: call "
    "generate with generation_config=GenerationConfig.from_pretrained({folder!r}), or give vLLM stop_token_ids"
)
_RESIZED = (
    "note: the tables have rows for new tokens: call resize_token_embeddings({rows}) on the frozen model before "
    "PeftModel.from_pretrained"
)


def peft_tensor(target: peft.PeftTensor, values: Tensor) -> Tensor:
    """Converts one of our whole tensors, with stacked experts and padded vocabulary, to its PEFT form."""
    return to_peft(target, _without_padding(target, values)).contiguous()


def _without_padding(target: peft.PeftTensor, values: Tensor) -> Tensor:
    """Removes vocabulary padding."""
    if target.kind == "whole":
        return values[: target.matrix.rows]
    if target.matrix.part == "embedding" and target.kind == "lora_a":
        return values[: target.matrix.columns]
    return values[: target.matrix.rows] if target.matrix.part == "output" and target.kind == "lora_b" else values
