"""Builds the layers of every model of configs/ twice, as ours and as TransformerEngine's, and prints what differs.

    python -m tests.mcore.transformer_engine.spec_program FOLDER_OF_THE_WHEEL [MODEL ...]

The world has one real rank; without names of models it builds all of them. Prints JSON: the models that were compared,
those for which te is refused, and the differences in parameters, buffers, places in checkpoints and initial weights.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mtrain.base.imports import faulty_gpu_packages, settle_gpu_packages
from tests.mcore.transformer_engine import compiled_stand_in
from tests.paths import ROOT

if __name__ == "__main__":
    compiled_stand_in.install(Path(sys.argv[1]))
    settle_gpu_packages(has_gpu=True)  # as on a machine with one: they are not hidden

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.load import load_config
from mtrain.mcore.distributed.groups import Groups, opened_groups
from mtrain.mcore.model import build
from mtrain.mcore.model.init_weights import draw_weights
from mtrain.mcore.model.layer_spec import canonical_name, chosen_backend
from mtrain.mcore.model.sharded_parameters import sharded_parameters, shards
from mtrain.mcore.model.transformer_config import transformer_config
from mtrain.plan.layout import Layout
from mtrain.verify.backend.cases import rows_like, starts_of

WORLD_SIZE, RANK = 2, 1
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp": 2, "sp": True}, {"pp": 2})
Backend = Literal["torch", "te"]
OPENED = ("qwen3_30b_a3b", "mixtral_8x7b")
"""Models that are refused without a certificate alone."""
BACKENDS: tuple[Backend, ...] = ("torch", "te")
MARKS = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "sequence_parallel": False,
    "allreduce": True,
    "shared": False,
}
"""Attribute that megatron-core marks parameters with -> its meaning on a parameter without the mark."""
_is_available = torch.cuda.is_available


def configured(path: Path, keys: Sequence[str] = ()) -> Config:
    """Configures a run of the model on rows of one document."""
    files = [path, ROOT / "configs" / "run" / "pretrain.yaml"]
    return load_config(files, ["data.isolate_documents=false", "data.seq_length=64", *keys])


def is_refused(config: Config) -> bool:
    """Says whether the model has a part that TransformerEngine's layers cannot follow; no other reason is allowed."""
    model = config.model.model_copy(update={"backend": "te"})
    try:
        return chosen_backend(config.model_copy(update={"model": model}), torch.device("cuda")) != "te"
    except ConfigError as error:
        text = str(error)
    *reasons, _ = text.split(": ", 1)[1].split("; ")  # the last one is the remedy
    endings = ("needs the torch backend", "needs the torch backend without a certificate")
    assert all(reason.endswith(endings) for reason in reasons), text
    return True


def small(path: Path, layout: dict[str, Any], *further: str) -> Config:
    """Reduces the model to a small one that keeps its names, and how sizes are divided."""
    sizes: dict[str, Any] = {
        "num_layers": 4,  # SmolLM3 has every fourth layer without rotary positions
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "head_dim": 8,
        "vocab_size": 500,
    }
    keys = {f"model.{key}": value for key, value in sizes.items()}
    keys |= {f"layout.{key}": str(value).lower() for key, value in layout.items()}
    return configured(path, [*(f"{key}={value}" for key, value in keys.items()), *further])


def built(config: Config, groups: Groups, backend: Backend) -> Any:
    """Builds a chunk of the model with its initial weights."""
    with torch.no_grad():
        try:
            vars(build)["chosen_backend"] = lambda *given: backend
            torch.cuda.is_available = lambda: backend == "te"  # its modules refuse to be made without one
            _, (chunk,) = build._build_chunks(config, groups)
        finally:
            torch.cuda.is_available = _is_available
        draw_weights(chunk, config, groups)
    return chunk


def described(chunk: Any, groups: Groups) -> dict[str, Any]:
    """Describes the contents of a chunk, by kind and name."""
    found: dict[str, Any] = {}
    for name, parameter in chunk.named_parameters():
        facts = {mark: getattr(parameter, mark, default) for mark, default in MARKS.items()}
        facts |= {"shape": list(parameter.shape), "dtype": str(parameter.dtype), "learns": parameter.requires_grad}
        found[f"parameter {canonical_name(name)}"] = facts
        found[f"weights {canonical_name(name)}"] = parameter.detach().view(torch.uint8).numpy().tobytes().hex()
    for name, buffer in chunk.named_buffers():
        found[f"buffer {canonical_name(name)}"] = [list(buffer.shape), str(buffer.dtype)]
    for place in sharded_parameters([chunk], groups):
        for each in shards(place, place.key, place.data):
            where = f"place {each.key} {list(each.global_offset)}"
            assert where not in found
            found[where] = [
                # the third number of a replica is its writing order, which follows the order of the parameters
                *(list(part) for part in (each.global_shape, each.local_shape, each.replica_id[:2])),
                each.prepend_axis_num,
                each.allow_shape_mismatch,
                str(each.dtype),
            ]
    states = nested_values(chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp}))
    others = {state.key for state in states if isinstance(state, ShardedObject)}
    # TransformerEngine pickles it with the weights; we do not keep it, as it is empty without fp8
    found |= {f"object {key}": True for key in others if not key.endswith("_extra_state")}
    return found


def compare(path: Path, layout: dict[str, Any], *further: str) -> list[str]:
    """Lists the differences between both backends."""
    config = small(path, layout, *further)
    with opened_groups(Layout.from_config(config, WORLD_SIZE), torch.device("cpu"), 1, 60) as groups:
        ours, theirs = (described(built(config, groups, backend), groups) for backend in BACKENDS)
    assert {name.partition(" ")[0] for name in ours} >= {"parameter", "weights", "place"}
    return [
        f"{path.stem} {layout} {name}: {str(ours.get(name))[:200]} in ours, {str(theirs.get(name))[:200]} in theirs"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def by_cu_seqlens(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Tensor:
    """Attends as TransformerEngine documents its packed form, one document after the other, [tokens, heads, dim]."""
    assert (mask, options["qkv_format"], options["attn_mask_type"]) == (None, "thd", "padding_causal")
    ends = options["cu_seqlens_q"].tolist()
    assert ends == options["cu_seqlens_kv"].tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert max(lengths) == options["max_seqlen_q"] == options["max_seqlen_kv"]
    left, right = attention.window_size
    assert right == 0
    found = []
    for parts in zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True):
        places = torch.arange(len(parts[0]))
        distance = places[:, None] - places
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        queries, keys, values = (part.transpose(0, 1) for part in parts)
        output = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        found.append(output.transpose(0, 1))
    return torch.cat(found).flatten(1)


def document_error(path: Path) -> float:
    """Returns the largest difference between both core attentions on rows of documents, with a window and without."""
    from transformer_engine.pytorch import DotProductAttention  # type: ignore[import-not-found]

    DotProductAttention.forward = by_cu_seqlens
    config = small(path, {}, "model.sliding_window=9", "model.global_attention_every=2", "data.isolate_documents=true")
    worst = 0.0
    with opened_groups(Layout.from_config(config, WORLD_SIZE), torch.device("cpu"), 1, 60) as groups:
        chunks = [built(config, groups, backend) for backend in BACKENDS]
        starts = starts_of(rows_like(True, 2, 64, torch.device("cpu")))
        for layers in zip(*(chunk.decoder.layers for chunk in chunks), strict=True):
            ours, theirs = (layer.self_attention.core_attention for layer in layers)
            generator = torch.Generator().manual_seed(0)
            heads = config.model.num_attention_heads, config.model.query_groups, config.model.query_groups
            given = [torch.randn(64, 2, number, config.model.head_size, generator=generator) for number in heads]
            mask_type = AttnMaskType.causal
            outputs = [core(*given, starts, attn_mask_type=mask_type) for core in (ours, theirs)]
            worst = max(worst, float((outputs[0] - outputs[1]).abs().max()))
    return worst


def recipes(path: Path) -> dict[str, str]:
    """Returns train.fp8_recipe -> the recipe that TransformerEngine builds for it."""
    found = {}
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        keys = ["train.fp8=hybrid", f"train.fp8_recipe={recipe}", "model.ffn_hidden_size=128", "model.hidden_size=128"]
        config = small(path, {}, *keys, "data.seq_length=128", "train.micro_batch_size=1")
        made = get_fp8_recipe(transformer_config(config, Layout(), torch.device("cpu")))
        found[recipe] = f"{type(made).__name__} {made.fp8_format.name}"
    return found


def main() -> None:
    """Compares every model under every layout."""
    assert faulty_gpu_packages() == {}
    warnings.simplefilter("ignore")  # from TransformerEngine, and about timeouts, which a fake world does not have
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    paths = sorted((ROOT / "configs" / "model").glob("*.yaml"))
    refused = [path for path in paths if is_refused(configured(path))]
    compared = [path for path in paths if path not in refused and path.stem in (sys.argv[2:] or [path.stem])]
    differences = [line for path in compared for layout in LAYOUTS for line in compare(path, layout)]
    differences += compare(compared[0], {}, "train.fp8=hybrid")
    for path in paths:
        if path.stem in OPENED:  # with some dense layers
            keys = ("model.experts.ffn_hidden_size=32", "model.experts.first_dense_layers=1")
            differences += [line for layout in (*LAYOUTS, {"ep": 2}) for line in compare(path, layout, *keys)]
    names = {kind: [path.stem for path in found] for kind, found in (("compared", compared), ("refused", refused))}
    print(
        json.dumps(
            {
                **names,
                "differences": differences,
                "recipes": recipes(compared[0]),
                "documents": document_error(compared[0]),
            }
        )
    )


if __name__ == "__main__":
    main()
