"""Builds the layers of every model of configs/ twice, as ours and as TransformerEngine's, and prints what differs.

    python -m tests.core.transformer_engine.spec_program FOLDER_OF_THE_WHEEL [MODEL ...]

The world has one real rank; without names of models it builds all of them. Prints JSON: the models that were compared,
those for which te is refused, and the differences in parameters, buffers, places in checkpoints and initial weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mtrain.base.imports import faulty_gpu_packages, settle_gpu_packages
from tests.core.transformer_engine import compiled_stand_in, semantics
from tests.paths import ROOT

if __name__ == "__main__":
    compiled_stand_in.install(Path(sys.argv[1]))
    settle_gpu_packages(has_gpu=True)  # as on a machine with one: they are not hidden

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.fp8_utils import get_fp8_recipe
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.core.layers import build
from mtrain.core.layers.init_weights import draw_weights
from mtrain.core.layers.layer_spec import canonical_name, chosen_backend
from mtrain.core.layers.sharded_parameters import sharded_parameters, shards
from mtrain.core.layers.transformer_config import transformer_config
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.hf.configuration import load_config
from mtrain.verify.backend import candidates, worker
from mtrain.verify.backend.cases import cases_of, few_layers

WORLD_SIZE, RANK = 2, 1
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp": 2, "sp": True}, {"pp": 2})
Backend = Literal["torch", "te"]
OPENED = ("qwen2_57b_a14b", "qwen3_30b_a3b", "mixtral_8x7b", "glm4.7_flash", "deepseek_v3")
"""Models that are refused without a certificate alone."""
OPENED_AMONG_FEW = ("mixtral_8x7b", "glm4.7_flash")
"""Models with experts alone, and with latent attention as well; all others have the same parts."""
DOCUMENTS = "data.isolate_documents=true"
WINDOWS = ("model.sliding_window=9", "model.global_attention_every=2")
VERIFIED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qwen3_8b", (DOCUMENTS, *WINDOWS)),
    ("mixtral_8x7b", ("model.linear_bias=true",)),
    ("glm4.7_flash", (DOCUMENTS,)),
    ("deepseek_v3", ()),
)
"""Models, with keys, whose layers are compared with the reference."""
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


@cache
def configured(path: Path, keys: tuple[str, ...] = ()) -> Config:
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
    if configured(path).model.mla is not None:
        del sizes["head_dim"]
        latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
        sizes |= {"num_attention_heads": 4, **{f"mla.{key}": size for key, size in latent.items()}}
    if configured(path).model.experts is not None:  # with some dense layers
        sizes |= {f"experts.{key}": size for key, size in {"num_experts": 16, "ffn_hidden_size": 32}.items()}
        sizes["experts.first_dense_layers"] = 1
    keys = {f"model.{key}": value for key, value in sizes.items()}
    keys |= {f"layout.{key}": str(value).lower() for key, value in layout.items()}
    return configured(path, (*(f"{key}={value}" for key, value in keys.items()), *further))


def built(config: Config, groups: Groups, backend: Backend) -> Any:
    """Builds a chunk of the model with its initial weights."""
    vars(build)["chosen_backend"] = lambda *given: backend
    with torch.no_grad():
        with a_gpu() if backend == "te" else nullcontext():
            _, (chunk,) = build.build_chunks(config, groups)
        draw_weights(chunk, config, groups)
    return chunk


@contextmanager
def a_gpu() -> Iterator[None]:
    """Lets a block make TransformerEngine's modules, which refuse that without a GPU."""
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = _is_available


def parameters(chunk: Any) -> dict[str, list[Any]]:
    """Returns the parameters by name: of experts a tensor for each, whether or not they are stacked."""
    found: dict[str, list[Any]] = {}
    for name, parameter in chunk.named_parameters():
        stack, parts = canonical_name(name), [parameter]
        if ".mlp.experts." in name:
            stack = stack.rstrip("0123456789")
            if stack == canonical_name(name):
                parts = list(parameter.detach().unbind())
                for part in parts:
                    vars(part).update(vars(parameter))
                    part.requires_grad_(parameter.requires_grad)
        found.setdefault(stack, []).extend(parts)
    return found


def described(chunk: Any, groups: Groups) -> dict[str, Any]:
    """Describes the contents of a chunk, by kind and name."""
    found: dict[str, Any] = {}
    for name, parts in parameters(chunk).items():
        first = parts[0]
        for parameter in parts:
            facts = {mark: getattr(parameter, mark, default) for mark, default in MARKS.items()}
            facts |= {"shape": list(first.shape), "dtype": str(parameter.dtype), "learns": parameter.requires_grad}
            assert found.setdefault(f"parameter {name}", facts) == facts
        found[f"weights {name}"] = "".join(
            part.detach().contiguous().view(torch.uint8).numpy().tobytes().hex() for part in parts
        )
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
    """Lists the differences between both backends, of which TransformerEngine's has further keys."""
    configs: dict[Backend, Config] = {"torch": small(path, layout), "te": small(path, layout, *further)}
    with opened_groups(Layout.from_config(configs["te"], WORLD_SIZE), torch.device("cpu"), 1, 60) as groups:
        ours, theirs = (described(built(config, groups, backend), groups) for backend, config in configs.items())
    assert {name.partition(" ")[0] for name in ours} >= {"parameter", "weights", "place"}
    return [
        f"{path.stem} {layout} {name}: {str(ours.get(name))[:200]} in ours, {str(theirs.get(name))[:200]} in theirs"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def verified(path: Path, *further: str) -> dict[str, float]:
    """Compares layers by TransformerEngine's documented semantics with the reference, as `mtrain verify backend` does.

    Returns:
        Candidate and kind of layer -> error of its worst tensor, in units of the tolerance.
    """
    user, worst = small(path, {}, *further), {}
    few, cases = few_layers(user, 64), cases_of(user)
    vars(candidates)["absent"] = lambda device: []
    vars(worker)["_WARM_UP"] = 0  # times are not looked at
    with opened_groups(Layout(dp=WORLD_SIZE), torch.device("cpu"), 1, 60) as groups:
        for each in candidates.CANDIDATES[:2]:
            on_a_gpu = dataclasses.replace(each, build=partial(_built, each))
            found = worker.compare(groups, worker.BackendJob(few, on_a_gpu, cases, (1, 64), 1))
            for case, result in [] if isinstance(found, str) else zip(cases, found, strict=True):
                name = f"{path.stem} {each.name} {case.name}"
                worst[name] = max(error.candidate / error.tolerance for error in result.errors)
    return worst


def _built(candidate: candidates.Candidate, config: Config, groups: Groups) -> torch.nn.Module:
    with torch.no_grad(), a_gpu():
        return candidate.build(config, groups)


def padding_error(path: Path) -> float:
    """Returns the largest difference between experts with and without the padding that products in 8 bits need."""
    with opened_groups(Layout.from_config(small(path, {}), WORLD_SIZE), torch.device("cpu"), 1, 60) as groups:
        chunk: Any = built(small(path, {}, "model.experts.implementation=te"), groups, "te")
        experts = chunk.decoder.layers[-1].mlp.experts
        counts = torch.tensor([3, 0, 16, 17, *[1] * (experts.num_local_experts - 4)])
        generator = torch.Generator().manual_seed(0)
        num_tokens = int(counts.sum())
        tokens = torch.randn(num_tokens, chunk.config.hidden_size, generator=generator).to(torch.bfloat16)
        given = tokens, counts, torch.rand(num_tokens, generator=generator)
        outputs = []
        for fp8 in (None, "hybrid"):
            experts.config.fp8 = fp8
            outputs.append(experts(*given)[0])
    return float((outputs[0] - outputs[1]).abs().max())


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
    semantics.install()
    paths = sorted((ROOT / "configs" / "model").glob("*.yaml"))
    refused = [path for path in paths if is_refused(configured(path))]
    compared = [path for path in paths if path not in refused and path.stem in (sys.argv[2:] or [path.stem])]
    # named models: one layout, since places in checkpoints follow from shapes and marks in all of them
    layouts = LAYOUTS[1:2] if sys.argv[2:] else LAYOUTS
    differences = [line for path in compared for layout in layouts for line in compare(path, layout)]
    differences += compare(compared[0], {}, "train.fp8=hybrid")
    for path in paths:
        if path.stem in (OPENED_AMONG_FEW if sys.argv[2:] else OPENED):
            for keys in ((), ("model.experts.implementation=te",)):
                differences += [line for layout in (*layouts, {"ep": 2}) for line in compare(path, layout, *keys)]
    names = {kind: [path.stem for path in found] for kind, found in (("compared", compared), ("refused", refused))}
    print(
        json.dumps(
            {
                **names,
                "differences": differences,
                "recipes": recipes(compared[0]),
                "verified": {
                    name: error
                    for stem, keys in VERIFIED
                    for name, error in verified(ROOT / "configs" / "model" / f"{stem}.yaml", *keys).items()
                },
                "padding": padding_error(ROOT / "configs" / "model" / "mixtral_8x7b.yaml"),
            }
        )
    )


if __name__ == "__main__":
    main()
