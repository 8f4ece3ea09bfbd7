"""Configurations: files and overrides as the command line gives them, as far as `mtrain check` reads them."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from mtrain.cli.arguments import split_arguments
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.hf.configuration import load_config
from mtrain.plan.summary import plan_lines
from tests.config.samples import content
from tests.fuzz.mutations import FLOATS, HUGE, TEXTS, TOKENS, mutated_bytes, mutated_tree
from tests.fuzz.target import Target
from tests.paths import CONFIGS

_FILE, _ARGUMENTS = "config.yaml", "arguments.json"


@cache
def _bases() -> tuple[dict[str, Any], ...]:
    """Returns configurations that are legal on eight ranks and together have every section."""
    sparse = {
        "num_experts": 8,
        "top_k": 2,
        "ffn_hidden_size": 32,
        "shared_ffn_hidden_size": 32,
        "score": "sigmoid",
        "num_groups": 4,
        "group_top_k": 2,
        "first_dense_layers": 1,
        "expert_bias": True,
        "bias_update_rate": 0.001,
    }
    latents = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    small = content()["model"]
    every_knob = Config.model_validate(content()).model_dump(mode="json")
    return (
        content(),
        every_knob,
        content(
            data={
                "kind": "indexed",
                "seq_length": 64,
                "train": [{"path": f"c{i}", "weight": i + 1} for i in range(12)],
            },
            data__split=[0.9, 0.1, 0],
            valid__interval_steps=5,
            layout={"tp": 2, "sp": True, "pp": 2, "vpp": 2, "cp": 2},
            model__megatron={"deterministic_mode": True, "microbatch_group_size_per_vp_stage": 4},
            model__rope={"scaling": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            model__sliding_window=7,
            model__global_attention_every=2,
        ),
        content(
            model={**small, "num_query_groups": None, "experts": sparse, "mla": latents, "mtp_depths": 1},
            layout={"ep": 2, "pp": 4, "stage_layers": [3, 2, 2, 1]},
            loss={
                "aggregation": "token-sum-norm",
                "norm_length": 64,
                "options": {"label_smoothing": 0.1},
                "side_terms": {"z": {"function": "mtrain.core.loss.objective:z_loss", "coefficient": 0.1}},
                "router": {"z_coefficient": 0.001, "sequence_balance_coefficient": 0.01},
            },
            checkpoint={"interval_steps": 5, "keep_every_steps": 10, "export_hf_every_steps": 10},
        ),
    )


def _write(folder: Path, random: Random) -> None:
    """Writes one file, and arguments of the command line."""
    base = random.choice(_bases())
    arguments, world_size = [_FILE], 8
    kind = random.choice(("tree", "tree", "tree", "bytes", "bytes", "override", "fragment", "world"))
    text = yaml.safe_dump(base, sort_keys=False)
    written = text.encode()
    match kind:
        case "tree":
            written = _dumped(mutated_tree(base, random))
        case "bytes":
            written = mutated_bytes(written, random)
        case "override":
            arguments += [_override(base, random) for _ in range(random.choice((1, 1, 2, 20)))]
        case "fragment":  # a file of the repository under a changed one
            arguments.insert(0, str(random.choice(sorted(CONFIGS.glob("*/*.yaml")))))
            written = _dumped(mutated_tree(base, random))
        case "world":
            world_size = random.choice((1, 3, 16, 64, 2**31, 2**63, 10**30))
    (folder / _FILE).write_bytes(written)
    (folder / _ARGUMENTS).write_text(json.dumps([arguments, world_size]))


def _dumped(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False).encode("utf-8", "surrogatepass")


def _override(base: dict[str, Any], random: Random) -> str:
    """Returns `section.key=value` of an existing key, a similar one, or nonsense."""
    section = random.choice(sorted(base))
    keys = sorted(base[section]) if isinstance(base[section], dict) else []
    key = random.choice((*keys, "num_layers", "unknown", "a.b.c.d", "a" * 300, ""))
    values = (
        *map(str, (*HUGE, *FLOATS)),
        *TEXTS,
        *(token.decode("utf-8", "surrogateescape") for token in TOKENS),
        json.dumps(mutated_tree(base[section], random)),
    )
    return random.choice((f"{section}.{key}={random.choice(values)}", f"{section}={random.choice(values)}", key))


def _read(folder: Path) -> None:
    """Reads the input as `mtrain check` does; the saved configuration must repeat the run."""
    arguments, world_size = json.loads((folder / _ARGUMENTS).read_text())
    paths, overrides = split_arguments([str(folder / _FILE) if name == _FILE else name for name in arguments])
    config = load_config(paths, overrides)
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):  # strict, as a terminal's encoding is
        print(*plan_lines(config, world_size), sep="\n")
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".yaml", encoding="utf-8") as saved:
        saved.write(config_yaml(config))
        saved.flush()
        assert load_config([Path(saved.name)], []) == config


TARGET = Target(_write, _read, frozenset({2, 3}))
