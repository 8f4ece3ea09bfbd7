"""One model stored in many ways: by the content of its files, and by their kinds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]
Config = dict[str, Any]
Content = Callable[[State, Config], None]
"""Function that changes tensors and config.json; the names are those of the usual files of the family."""
Files = Callable[[Path, State, Config], None]
"""Function that writes tensors to a folder, and may change its config.json."""

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_BLOCK = 2
"""Size of a block, which divides every size: at an edge transformers 5.24 takes blocks of another size, or fails."""


def without_base(state: State, config: Config) -> None:
    for name in [name for name in state if name.startswith("model.")]:
        state[name.removeprefix("model.")] = state.pop(name)


def head_twice(state: State, config: Config) -> None:
    if config["tie_word_embeddings"]:
        state[HEAD] = state[EMBEDDINGS].clone()


def another_head(state: State, config: Config) -> None:
    if config["tie_word_embeddings"]:
        state[HEAD] = state[EMBEDDINGS].flip(0)


def without_head(state: State, config: Config) -> None:
    state.pop(HEAD, None)


def fused(state: State, config: Config) -> None:
    """Fuses experts as transformers 5 saves them with save_original_format=False."""
    for layer in range(config["num_hidden_layers"]):
        for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
            for module in ("mlp", "block_sparse_moe"):
                start = f"model.layers.{layer}.{module}"
                each = f"{start}.experts.{{}}.{{}}.weight"
                numbers = [number for number in range(99) if each.format(number, gate) in state]
                if numbers:
                    halves = [
                        torch.cat([state.pop(each.format(number, one)) for one in (gate, up)]) for number in numbers
                    ]
                    state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(halves)
                    second = [state.pop(each.format(number, down)) for number in numbers]
                    state[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(second)
                    state[f"model.layers.{layer}.mlp.gate.weight"] = state.pop(f"{start}.gate.weight")


def fused_without_base(state: State, config: Config) -> None:
    fused(state, config)
    without_base(state, config)


def as_dtype(dtype: torch.dtype) -> Content:
    def change(state: State, config: Config) -> None:
        state.update({name: value.to(dtype) for name, value in state.items()})
        config["dtype"] = str(dtype).removeprefix("torch.")

    return change


def wider_norms(state: State, config: Config) -> None:
    state.update({name: value.float() for name, value in state.items() if "norm" in name})


def in_blocks(scales: torch.dtype) -> Content:
    """Stores projections of layers in fp8; factors are powers of two, so that no product is rounded."""

    def change(state: State, config: Config) -> None:
        for name in [name for name in state if name.endswith("_proj.weight")]:
            state[name] = state[name].to(torch.float8_e4m3fn)
            rows, columns = (-(-size // _BLOCK) for size in state[name].shape)
            factors = 2.0 ** (torch.arange(rows * columns).view(rows, columns) % 3 - 1)
            state[f"{name}_scale_inv"] = factors.to(scales)
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        }

    return change


def extra(name: str, value: Tensor) -> Content:
    return lambda state, config: state.update({name: value})


def said(**fields: Any) -> Content:
    return lambda state, config: config.update(fields)


CONTENTS: dict[str, Content] = {
    "as saved": lambda state, config: None,
    "saved from the base model": without_base,
    "head twice": head_twice,
    "another head": another_head,
    "without a head": without_head,
    "fused experts": fused,
    "fused experts of the base model": fused_without_base,
    "float16": as_dtype(torch.float16),
    "float32": as_dtype(torch.float32),
    "wider norms": wider_norms,
    "fp8": in_blocks(torch.float32),
    "fp8 with scales in E8M0": in_blocks(torch.float8_e8m0fnu),
    "frequencies": extra("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    "frequencies of the model": extra("model.rotary_emb.inv_freq", torch.ones(4)),
    "an empty tensor": extra("model.extra", torch.empty(0, 3)),
    "a scalar": extra("model.extra", torch.tensor(1.0)),
    "packed in U32": extra("model.extra", torch.ones(4, dtype=torch.uint32)),
    "nothing quantised": said(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nothing quantised, bitsandbytes": said(
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    ),
    "quantised while it loads": said(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "use_qk_norm": said(use_qk_norm=True),
}


def whole(folder: Path, state: State, config: Config) -> None:
    save_file(state, folder / WHOLE, {"format": "pt"})


def index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def sharded(folder: Path, state: State, config: Config) -> None:
    names = sorted(state)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    for number, part in enumerate(parts, start=1):
        save_file({name: state[name] for name in part}, folder / shard(number), {"format": "pt"})
    index(folder, {name: shard(number) for number, part in enumerate(parts, start=1) for name in part})


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00002.safetensors"


def other(state: State) -> State:
    """Builds another model of the same names and shapes."""
    return {name: (-value.float()).to(value.dtype) for name, value in state.items()}


def with_other_shards(folder: Path, state: State, config: Config) -> None:
    sharded(folder, other(state), config)
    whole(folder, state, config)


def stale_index(folder: Path, state: State, config: Config) -> None:
    whole(folder, state, config)
    index(folder, dict.fromkeys(state, shard(1)))


def index_of_the_whole(folder: Path, state: State, config: Config) -> None:
    whole(folder, state, config)
    index(folder, dict.fromkeys(state, WHOLE))


def named(name: str) -> Files:
    def write(folder: Path, state: State, config: Config) -> None:
        save_file(state, folder / name, {"format": "pt"})
        if name != WHOLE:
            whole(folder, other(state), config)
        config["transformers_weights"] = name

    return write


def with_file(name: str) -> Files:
    def write(folder: Path, state: State, config: Config) -> None:
        whole(folder, state, config)
        if name.endswith(".bin"):
            torch.save(other(state), folder / name)
        else:
            save_file(other(state), folder / name, {"format": "pt"})

    return write


def only_another(folder: Path, state: State, config: Config) -> None:
    save_file(state, folder / "model.fp16.safetensors", {"format": "pt"})


def shards_and_another(folder: Path, state: State, config: Config) -> None:
    sharded(folder, state, config)
    save_file(other(state), folder / "model-00003-of-00009.safetensors", {"format": "pt"})


def with_adapter(folder: Path, state: State, config: Config) -> None:
    whole(folder, state, config)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    start = "base_model.model.model.layers.0.self_attn.o_proj"
    rows, columns = state.get("model.layers.0.self_attn.o_proj.weight", torch.ones(32, 64)).shape
    pair = {f"{start}.lora_A.weight": torch.ones(2, columns), f"{start}.lora_B.weight": torch.ones(rows, 2)}
    save_file(pair, folder / "adapter_model.safetensors", {"format": "pt"})


def in_two_shards(folder: Path, state: State, config: Config) -> None:
    sharded(folder, state, config)
    names = sorted(state)
    last = {name: state[name] for name in names[len(names) // 2 :]}
    save_file(last | other({names[0]: state[names[0]]}), folder / shard(2), {"format": "pt"})


def unlisted(folder: Path, state: State, config: Config) -> None:
    sharded(folder, state, config)
    content = json.loads((folder / INDEX).read_text())
    del content["weight_map"][sorted(state)[0]]
    (folder / INDEX).write_text(json.dumps(content))


FILES: dict[str, Files] = {
    "whole": whole,
    "sharded": sharded,
    "whole with other shards": with_other_shards,
    "whole with a stale index": stale_index,
    "whole with its own index": index_of_the_whole,
    "named as it is found": named(WHOLE),
    "another one named": named("other.safetensors"),
    "whole with a variant": with_file("model.fp16.safetensors"),
    "whole with a pickle": with_file("pytorch_model.bin"),
    "whole with a shard without an index": with_file("model-00001-of-00002.safetensors"),
    "a variant alone": only_another,
    "sharded with another shard": shards_and_another,
    "with an adapter": with_adapter,
    "a tensor in two shards": in_two_shards,
    "a tensor that the index leaves out": unlisted,
}


def store(folder: Path, state: State, config: Config, content: str, files: str) -> None:
    """Writes a model in one of the ways; the arguments stay as they are."""
    state, config = {name: value.clone() for name, value in state.items()}, dict(config)
    CONTENTS[content](state, config)
    folder.mkdir()
    FILES[files](folder, state, config)
    (folder / "config.json").write_text(json.dumps(config))
