"""Finds checkpoints of Megatron-LM and Megatron-Bridge.

    DIR/latest_checkpointed_iteration.txt       100, or `release`
    DIR/latest_train_state.pt                   Bridge's; not read
    DIR/iter_0000100/.metadata [common.pt] metadata.json *.distcp [run_config.yaml] [integrity.json]

Reads only `.metadata`, as plain data, the tensors' bytes and plain text. The other program's arguments are a pickle
(common.pt, or `common_state` since Megatron-Core 0.19), which is never read, so the user gives the model's
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
"""Folder of a rank in the old format, named by its tensor, pipeline and expert ranks; the last two may be missing."""


def megatron_folder(path: Path) -> Path | None:
    """Returns the folder with the tensors of another program's checkpoint; None if the path has none. The path is the
    folder of one iteration, or of several; then the latest is returned."""
    with disk_faults(f"read {path}"):
        # our checkpoints have a manifest besides .metadata
        if (path / MANIFEST_NAME).exists():
            return None
        if (path / _LIST).exists():
            return path
        if (path / LATEST_NAME).exists():
            return _checked(path, _text(path / LATEST_NAME))
        if _LEGACY.fullmatch(path.name) and any(path.glob("*.pt")):
            raise _legacy(path.parent)
        old = next(
            (folder for folder in (path, *sorted(path.glob("iter_*"), reverse=True)) if _is_legacy(folder)), None
        )
        iterations = sorted(match.parent.name for match in path.glob(f"iter_*/{_LIST}"))
    if iterations:
        # not the highest number, because an interrupted save also leaves a folder
        raise DataError(
            f"{path} has no {LATEST_NAME} to tell which iteration is the latest; name a folder such as {iterations[-1]}"
        )
    if old is not None:
        raise _legacy(old)
    return None


def check_format(folder: Path, keys: Iterable[str]) -> None:
    """Refuses checkpoints of Megatron-FSDP, which saves the halves of SwiGLU separately."""
    if (key := next((key for key in keys if _HALF.search(key)), None)) is not None:
        raise DataError(
            f"{folder} has Megatron-FSDP's format fsdp_dtensor, as {key} shows, which mtrain cannot read; save it "
            "again with --ckpt-format torch_dist"
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
    # checks the text, which comes from outside, before it becomes part of a path
    if latest != RELEASE and not re.fullmatch(r"\d{1,9}", latest):
        raise DataError(
            f"{path / LATEST_NAME} says {latest[:40]!r}, which is neither a number nor `release`; name the iteration's "
            "folder instead"
        )
    # Megatron-LM pads the number only in the folder's name
    folder = path / (latest if latest == RELEASE else f"iter_{int(latest):07d}")
    if (folder / _LIST).exists():
        return folder
    if _is_legacy(folder):
        raise _legacy(folder)
    raise DataError(
        f"{path / LATEST_NAME} names {folder.name}, which has no {_LIST}; name the folder of a complete iteration"
    )


def _is_legacy(folder: Path) -> bool:
    return folder.is_dir() and any(_LEGACY.fullmatch(entry.name) for entry in folder.iterdir())


def _legacy(folder: Path) -> DataError:
    return DataError(
        f"{folder} has one pickled file per rank (--ckpt-format torch), which mtrain never loads; start Megatron-LM "
        "once with the options of its training and --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and name "
        "DIR/torch_dist"
    )


def check_run_config(folder: Path, model: ModelSection) -> None:
    """Compares the model with Megatron-Bridge's run_config.yaml, whose values shapes do not all show."""
    path = folder / _RUN_CONFIG
    if not path.exists():
        return
    try:
        content = parsed_yaml(read_plain_file(path, _MOST_BYTES))
        theirs: Mapping[str, Any] = content["model"]
        faults = [
            f"{name}={theirs[name]}, but {key}={value}"
            for name, (key, value) in _comparable(model).items()
            # float, because true is 1.0 and a base may be 1e6 or 1000000; Bridge writes null for unset values
            if theirs.get(name) is not None and float(theirs[name]) != float(value)
        ]
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; remove it if it is not Bridge's") from fault
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        raise DataError(f"{path} cannot be understood ({str(fault)[:200]}); remove it if it is not Bridge's") from fault
    if faults:
        raise DataError(f"{path} has {'; '.join(faults)}; set the model as it was trained")


def _comparable(model: ModelSection) -> dict[str, tuple[str, float]]:
    """Returns the name in Bridge's file -> our key and value."""
    values: dict[str, tuple[str, float]] = {
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
        values |= {
            "num_moe_experts": ("model.experts.num_experts", model.experts.num_experts),
            "moe_router_topk": ("model.experts.top_k", model.experts.top_k),
            "moe_router_pre_softmax": ("model.experts.pre_softmax", model.experts.pre_softmax),
            "moe_shared_expert_gate": ("model.experts.shared_gate", model.experts.shared_gate),
        }
    return values
