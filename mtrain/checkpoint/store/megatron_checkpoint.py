"""Location of checkpoints that Megatron-LM and Megatron-Bridge wrote.

    DIR/latest_checkpointed_iteration.txt       100, or `release`
    DIR/latest_train_state.pt                   Bridge's; not read
    DIR/iter_0000100/.metadata [common.pt] metadata.json *.distcp [run_config.yaml] [integrity.json]

Only `.metadata`, read as plain data, the tensors' bytes and plain text are used. The other program's arguments are a
pickle (common.pt, or `common_state` since Megatron-Core 0.19), which is never read, so the user gives the model's
configuration.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults
from mtrain.base.plain_files import NOT_A_PLAIN_FILE, parsed_yaml, read_plain_file
from mtrain.checkpoint.store.manifest import MANIFEST_NAME
from mtrain.config.schema.model import ModelSection

LATEST_NAME, RELEASE = "latest_checkpointed_iteration.txt", "release"
_LIST, _RUN_CONFIG = ".metadata", "run_config.yaml"
_MOST_BYTES = 1 << 20
"""Largest size of a text file next to the tensors."""
_HALF = re.compile(r"\.weight\d*_[wv]$")
_LEGACY = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
"""Folder of a rank in the old format: its numbers in tensor, pipeline and expert parallelism, without axes of one
rank."""


def megatron_folder(path: Path) -> Path | None:
    """Returns the folder with the tensors of another program's checkpoint; None if the path holds none. The path is the
    folder of one iteration, or of several: then the latest one is used."""
    with disk_faults(f"read {path}"):
        # ours has a .metadata and a manifest
        if (path / MANIFEST_NAME).exists():
            return None
        if (path / _LIST).exists():
            return path
        if (path / LATEST_NAME).exists():
            return _checked(path, _text(path / LATEST_NAME))
        if _LEGACY.fullmatch(path.name) and any(path.glob("*.pt")):
            raise _legacy(path.parent)
        old = next((each for each in (path, *sorted(path.glob("iter_*"), reverse=True)) if _is_legacy(each)), None)
        iterations = sorted(found.parent.name for found in path.glob(f"iter_*/{_LIST}"))
    if iterations:
        # not the highest number: an interrupted save leaves a folder as well
        raise DataError(
            f"{path} has no {LATEST_NAME} to say which is the latest; name a folder such as {iterations[-1]}"
        )
    if old is not None:
        raise _legacy(old)
    return None


def check_format(folder: Path, keys: Iterable[str]) -> None:
    """Refuses what Megatron-FSDP wrote, which saves the halves of SwiGLU separately."""
    if (key := next((key for key in keys if _HALF.search(key)), None)) is not None:
        raise DataError(
            f"{folder} has the format fsdp_dtensor of Megatron-FSDP, as {key} shows, which is not read; save it there "
            "with --ckpt-format torch_dist"
        )


def _text(path: Path) -> str:
    try:
        return read_plain_file(path, _MOST_BYTES).decode(errors="replace").strip()
    except OSError as fault:
        if fault.errno not in NOT_A_PLAIN_FILE:
            raise
        raise DataError(
            f"{path} cannot be read: {fault.strerror or fault}; name the iteration's folder instead"
        ) from fault


def _checked(path: Path, latest: str) -> Path:
    # checked before it becomes part of a path: the text comes from outside
    if latest != RELEASE and not re.fullmatch(r"\d{1,9}", latest):
        raise DataError(
            f"{path / LATEST_NAME} says {latest[:40]!r}, which is neither a number nor `release`; name the iteration's "
            "folder instead"
        )
    # int: Megatron-LM writes the number plain and pads the name of the folder
    folder = path / (latest if latest == RELEASE else f"iter_{int(latest):07d}")
    if (folder / _LIST).exists():
        return folder
    if _is_legacy(folder):
        raise _legacy(folder)
    raise DataError(f"{path / LATEST_NAME} names {folder.name}, which has no {_LIST}; name a whole iteration's folder")


def _is_legacy(folder: Path) -> bool:
    return folder.is_dir() and any(_LEGACY.fullmatch(each.name) for each in folder.iterdir())


def _legacy(folder: Path) -> DataError:
    return DataError(
        f"{folder} has one pickled file per rank (--ckpt-format torch), which is never loaded; start Megatron-LM once "
        "as it was trained, with --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and name DIR/torch_dist"
    )


def check_run_config(folder: Path, model: ModelSection) -> None:
    """Compares the model with Bridge's run_config.yaml, for values that shapes do not show."""
    path = folder / _RUN_CONFIG
    if not path.exists():
        return
    try:
        content = parsed_yaml(read_plain_file(path, _MOST_BYTES))
        theirs: Mapping[str, Any] = content["model"]
        faults = [
            f"{name}={theirs[name]}, but {key}={value}"
            for name, (key, value) in _comparable(model).items()
            # float on both sides: true is 1.0, and a base may be written as 1e6 or 1000000; null: Bridge has not set it
            if theirs.get(name) is not None and float(theirs[name]) != float(value)
        ]
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; remove it if it is not Bridge's") from fault
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        raise DataError(f"{path} cannot be understood ({str(fault)[:200]}); remove it if it is not Bridge's") from fault
    if faults:
        raise DataError(f"{path} says {'; '.join(faults)}; set the model as it was trained")


def _comparable(model: ModelSection) -> dict[str, tuple[str, float]]:
    """Returns the name in Bridge's file -> our key and its value."""
    found: dict[str, tuple[str, float]] = {
        "num_layers": ("model.num_layers", model.num_layers),
        "hidden_size": ("model.hidden_size", model.hidden_size),
        "num_attention_heads": ("model.num_attention_heads", model.num_attention_heads),
        "num_query_groups": ("model.num_query_groups", model.query_groups),
        "kv_channels": ("model.head_dim", model.head_size),
        "layernorm_epsilon": ("model.norm_epsilon", model.norm_epsilon),
        "rotary_base": ("model.rope.base", model.rope.base),
        "rotary_percent": ("model.rope.partial", model.rope.partial),
        "share_embeddings_and_output_weights": ("model.tied_embeddings", model.tied_embeddings),
    }
    if model.experts is not None:
        found |= {
            "num_moe_experts": ("model.experts.num_experts", model.experts.num_experts),
            "moe_router_topk": ("model.experts.top_k", model.experts.top_k),
            "moe_router_pre_softmax": ("model.experts.pre_softmax", model.experts.pre_softmax),
            "moe_shared_expert_gate": ("model.experts.shared_gate", model.experts.shared_gate),
        }
    return found
