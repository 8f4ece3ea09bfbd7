"""Adapters go to PEFT and come back: the logits are the same on both sides, merged or not, on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from numpy.typing import NDArray
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.config import Config
from mtrain.convert.adapters import export_adapter
from mtrain.convert.exporting import export_hf
from mtrain.convert.verifying import random_tokens
from mtrain.hf.configuration import load_config
from mtrain.hf.io.peft import PeftFolder, adapter_of
from mtrain.hf.schema.peft import config_of, path_in_model, tensors
from mtrain.hf.schema.registry import family_of_run
from tests.config.samples import content
from tests.core.adapters import peft_ranks
from tests.fault_table import Notice
from tests.hf.folders import class_of, save
from tests.messages import refuses
from tests.pool import Pool
from tests.training.engine_parts.hf_ranks import bits_of

LORA: dict[str, Any] = {"rank": 3, "alpha": 5.0}
ALL = ["qkv", "proj", "fc1", "fc2"]
PATTERNS = {
    "rank_pattern": {"qkv": 2, "k_proj": 4, "fc1": 5, "embedding": 1},
    "alpha_pattern": {"q_proj": 7.5, "fc2": 2, "embedding": 3},
}
TABLES = ["embed_tokens", "lm_head"]
OF_EXPERTS = {"rank_pattern": {"experts": 2}, "alpha_pattern": {"experts": 7}}
CASES: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "lora": ("llama", LORA | {"targets": [*ALL, "embedding", "output"]}, Layout(tp=2, pp=2)),
    "rslora": ("qwen2", LORA | {"targets": ["q_proj", "v_proj", "fc1"], "scaling": "rslora"}, Layout(tp=2, sp=True)),
    "dora": ("llama", LORA | {"targets": ALL, "kind": "dora"}, Layout(tp=2)),
    "patterns": ("llama", LORA | {"targets": [*ALL, "embedding", "output"], **PATTERNS}, Layout(tp=2, pp=2)),
    "patterns of experts": ("mixtral", LORA | {"targets": ["q_proj", "experts"], **OF_EXPERTS}, Layout(tp=2, sp=True)),
    "whole tables": ("llama", LORA | {"targets": ["qkv", "fc2"], "modules_to_save": TABLES}, Layout(tp=2, pp=2)),
    **{
        f"norms of {family}": (family, LORA | {"targets": ["fc2", "proj"], "modules_to_save": ["norm"]}, layout)
        for family, layout in {
            "llama": Layout(tp=2, pp=2),
            "olmo2": Layout(tp=2, sp=True),
            "qwen3.5": Layout(tp=2, sp=True),
            "deepseek": Layout(),
            "gemma4-experts": Layout(),
            "nemotron-h": Layout(tp=2, sp=True),
        }.items()
    },
    "base in bf16": (
        "llama",
        LORA | {"targets": [*ALL, "embedding"], "base_dtype": "bf16"},
        Layout(dp=2, shard="weights"),
    ),
    "experts": ("mixtral", LORA | {"targets": ["q_proj", "proj", "experts"]}, Layout(tp=2, sp=True)),
    "latent attention, dense and shared": ("deepseek", LORA | {"targets": ALL}, Layout()),
    "delta nets": ("qwen3.5", LORA | {"targets": [*ALL, "in_proj", "out_proj"]}, Layout(tp=2, sp=True)),
    "fused delta nets, shared experts": (
        "qwen3-next",
        LORA
        | {
            "targets": [*ALL, "in_proj_qkvz", "in_proj_ba", "out_proj"],
            "rank_pattern": {"in_proj_ba": 2, "fc2": 2},
        },
        Layout(tp=2, sp=True),
    ),
    "fused dense": ("phi3", LORA | {"targets": ["qkv_proj", "proj", "gate_up_proj", "fc2"]}, Layout(tp=2)),
    "fused dora": (
        "phi3",
        LORA | {"targets": ["qkv_proj", "proj", "gate_up_proj", "fc2"], "kind": "dora"},
        Layout(tp=2, sp=True),
    ),
    "mamba": ("nemotron-h", LORA | {"targets": [*ALL, "in_proj"]}, Layout(tp=2, sp=True)),
    "experts next to images": (
        "qwen3.5-moe-images",
        LORA | {"targets": ["q_proj", "experts"], **OF_EXPERTS},
        Layout(tp=2, sp=True),
    ),
    "interleaved experts": ("gpt-oss", LORA | {"targets": ["experts"]}, Layout()),
}
"""Name of a case -> folder, adapter, and the layout that saves."""
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 2}


def run_config(hf: Path, run: Path, adapter: dict[str, Any]) -> Config:
    sections = content(adapter=adapter, run__dir=str(run), train__precision="fp32")
    sections |= {"model": {"hf": str(hf), "vocab_multiple": 8}, "train": sections["train"] | {"micro_batch_size": 2}}
    return load_config([], [f"{name}={json.dumps(value)}" for name, value in sections.items()])


def whole(parts: list[Any], vocab_size: int) -> NDArray[np.float32]:
    """Logits of the last stage's ranks side by side, without padding."""
    joined: NDArray[np.float32] = np.concatenate([part for part in parts if part is not None], axis=-1)
    return joined[..., :vocab_size]


def assert_close(found: NDArray[np.float32], expected: torch.Tensor) -> None:
    largest = float(expected.abs().max())
    np.testing.assert_allclose(found / largest, expected.numpy() / largest, rtol=0, atol=1e-5)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Returns what ranks stream: tensors of images stay in their folder."""
    return {name: bits_of(each) for name, each in tensors.items() if not name.startswith("model.visual.")}


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.eval()(tokens).logits
    return found


def loaded(folder: Path) -> Any:
    auto = class_of(transformers.AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def held(folder: Path, adapter: dict[str, Any]) -> Any:
    """Returns the frozen model as a run holds it: with its matrices rounded."""
    model = loaded(folder)
    if "base_dtype" in adapter:
        with torch.no_grad():
            for each in model.parameters():
                if each.dim() > 1:
                    each.copy_(each.to(torch.bfloat16))
    return model


# rslora: test_an_adapter_that_peft_saved_starts_a_run; the base in bf16: test_base_precision.py; the others have no
# target, kind or axis that "patterns", "patterns of experts", "fused dora" and "norms of qwen3.5" lack
BY_NIGHT = ["rslora", "base in bf16", "interleaved experts", "lora", "dora", "experts", "fused dense"]
BY_NIGHT += [name for name in CASES if name.startswith("norms of")]  # by day those that PEFT has saved, below
# tables: below; delta nets and experts: with shared experts and with patterns
BY_NIGHT += ["whole tables", "delta nets", "experts next to images", "fused dora"]  # dora: of PEFT, below


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in CASES]
)
def test_an_adapter_goes_to_peft_merged_and_not_and_comes_back(pool: Pool, tmp_path: Path, name: str) -> None:
    family, adapter, layout = CASES[name]
    hf = tmp_path / "hf"
    changes = LAYERS if family == "llama" else {} if family == "deepseek" else {"num_key_value_heads": 2}
    save(family, hf, torch.float32, **changes)
    user = run_config(hf, tmp_path / "run", adapter)
    tokens = random_tokens(user.model.vocab_size)
    ranks = pool.run(peft_ranks.saved, layout, user, tokens.numpy())
    ours = whole([rank.logits for rank in ranks], user.model.vocab_size)
    plain = logits_of(held(hf, adapter), tokens)
    assert np.abs(ours - plain.numpy()).max() > 1e-2 * float(plain.abs().max()), "the adapter does something"

    export_adapter(tmp_path / "run", tmp_path / "adapter", None)
    assert_close(ours, logits_of(peft.PeftModel.from_pretrained(held(hf, adapter), tmp_path / "adapter"), tokens))
    export_hf(tmp_path / "run", tmp_path / "merged", None, None, num_workers=1)
    assert_close(ours, logits_of(loaded(tmp_path / "merged"), tokens))
    base = tensors_in(hf)
    if "base_dtype" in adapter:
        base = {name: each.bfloat16() if each.dim() > 1 else each for name, each in base.items()}
    # trained, so not of the frozen model
    left = tuple(f"{each}.weight" for each in adapter.get("modules_to_save", []))
    left += ("norm_f.weight", "norm_1.weight", "norm_2.weight") if "norm.weight" in left else ()
    for rank in ranks:
        assert rank.streamed["adapter"] == bits(tensors_in(tmp_path / "adapter"))
        assert rank.streamed["merged"] == bits(tensors_in(tmp_path / "merged"))
        assert rank.streamed["base"] == bits({name: each for name, each in base.items() if not name.endswith(left)})

    again = run_config(hf, tmp_path / "again", adapter | {"path": str(tmp_path / "adapter")})
    back = whole(pool.run(peft_ranks.started, Layout(), again, tokens.numpy()), user.model.vocab_size)
    assert_close(back, torch.from_numpy(ours))


@pytest.mark.nightly  # tied tables that learn: below
def test_an_adapter_of_a_tied_table_leaves_the_output_layer_on_the_frozen_one(pool: Pool, tmp_path: Path) -> None:
    hf, adapter = tmp_path / "hf", LORA | {"targets": ["q_proj", "embedding"]}
    save("llama-tied", hf, torch.float32, **LAYERS)
    user = run_config(hf, tmp_path / "run", adapter)
    assert user.model.tied_embeddings
    tokens = random_tokens(user.model.vocab_size)
    ranks = pool.run(peft_ranks.saved, Layout(tp=2, pp=2), user, tokens.numpy())
    ours = whole([rank.logits for rank in ranks], user.model.vocab_size)
    plain = logits_of(loaded(hf), tokens)
    assert np.abs(ours - plain.numpy()).max() > 1e-2 * float(plain.abs().max()), "the adapter does something"
    export_adapter(tmp_path / "run", tmp_path / "adapter", None)
    assert_close(ours, logits_of(peft.PeftModel.from_pretrained(loaded(hf), tmp_path / "adapter"), tokens))
    with refuses(ConfigError, "targets=embedding"):
        export_hf(tmp_path / "run", tmp_path / "merged", None, None, num_workers=1)
    again = run_config(hf, tmp_path / "again", adapter | {"path": str(tmp_path / "adapter")})
    back = whole(pool.run(peft_ranks.started, Layout(), again, tokens.numpy()), user.model.vocab_size)
    assert_close(back, torch.from_numpy(ours))


@pytest.mark.parametrize(
    ("tied", "names"),
    # one table of two goes the same way; tests/parity/objectives/test_modules_to_save.py has two
    [(True, ["embed_tokens", "lm_head"]), pytest.param(False, ["lm_head"], marks=pytest.mark.nightly)],
    ids=["tied", "one of two"],
)
def test_whole_tables_of_peft_start_a_run_and_go_back(pool: Pool, tmp_path: Path, tied: bool, names: list[str]) -> None:
    """A tied table stays one with PEFT's ensure_weight_tying, which saves it under both names."""
    hf, folder = tmp_path / "hf", tmp_path / "of peft"
    save("llama-tied" if tied else "llama", hf, torch.float32, **LAYERS)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=list(names),
        ensure_weight_tying=tied,
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(loaded(hf), settings)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".modules_to_save." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    adapter = {"rank": 4, "alpha": 6, "targets": ["q_proj", "fc2"], "modules_to_save": names, "path": str(folder)}
    user = run_config(hf, tmp_path / "run", adapter)
    found = adapter_of(folder, family_of_run(user), user.model)
    assert found.modules_to_save == (("embedding",) if tied else ("output",))
    tokens = random_tokens(user.model.vocab_size)
    ours = pool.run(peft_ranks.started, Layout(tp=2, pp=2), user, tokens.numpy())
    expected = logits_of(theirs, tokens)
    assert float((expected - logits_of(loaded(hf), tokens)).abs().max()) > 1e-2 * float(expected.abs().max())
    assert_close(whole(ours, user.model.vocab_size), expected)

    saved = whole(
        [rank.logits for rank in pool.run(peft_ranks.saved, Layout(pp=2), user, tokens.numpy())], user.model.vocab_size
    )
    entry = checkpoint_at(tmp_path / "run").entry
    assert entry is not None
    held = {key for key in CheckpointTensors(entry.path).tensors if "_adapter." not in key and "rng" not in key}
    table = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    assert {key for key in held if key.startswith("optimizer")} == {
        f"optimizer.state.{state}.{table}" for state in ("param", "exp_avg", "exp_avg_sq")
    }
    assert {key for key in held if not key.startswith("optimizer")} == {table}
    export_adapter(tmp_path / "run", tmp_path / "adapter", None)
    assert_close(saved, logits_of(peft.PeftModel.from_pretrained(loaded(hf), tmp_path / "adapter"), tokens))
    export_hf(tmp_path / "run", tmp_path / "merged", None, None, num_workers=1)
    assert_close(saved, logits_of(loaded(tmp_path / "merged"), tokens))

    def refusal(given: dict[str, Any], **content: Any) -> str:
        there = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(there | content))
        user = run_config(hf, tmp_path / "run", given)
        assert user.adapter is not None
        with pytest.raises(DataError, match=r"adapter_config\.json") as caught:
            PeftFolder(folder, family_of_run(user), user.model, user.adapter)
        return str(caught.value)

    assert "but adapter.modules_to_save is empty" in refusal(adapter | {"modules_to_save": None})
    assert "modules_to_save=['norm']" in refusal(adapter, modules_to_save=["norm"])
    if tied:
        assert "ensure_weight_tying" in refusal(adapter, modules_to_save=names, ensure_weight_tying=False)


def test_norms_that_peft_saved_whole_start_a_run(pool: Pool, tmp_path: Path) -> None:
    """PEFT takes every module whose path ends in "norm"; a folder with some of the norms is refused."""
    hf, folder = tmp_path / "hf", tmp_path / "of peft"
    save("qwen3", hf, torch.float32, num_key_value_heads=2)
    expected = []
    for names in (["norm"], ["q_norm"]):
        settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], modules_to_save=names)
        theirs = peft.get_peft_model(loaded(hf), settings)
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        theirs.save_pretrained(folder / names[0])
        expected.append(theirs)
    adapter = {"rank": 4, "alpha": 6, "targets": ["q_proj"], "modules_to_save": ["norm"], "path": str(folder / "norm")}
    user = run_config(hf, tmp_path / "run", adapter)
    found = adapter_of(folder / "norm", family_of_run(user), user.model)
    assert found.modules_to_save == ("norms",)
    tokens = random_tokens(user.model.vocab_size)
    ours = pool.run(peft_ranks.started, Layout(tp=2, sp=True), user, tokens.numpy())
    assert_close(whole(ours, user.model.vocab_size), logits_of(expected[0], tokens))
    assert user.adapter is not None
    with refuses(DataError, "it lacks", "input_layernorm"):
        PeftFolder(folder / "q_norm", family_of_run(user), user.model, user.adapter)


def judged(folder: Path, adapter: Path | None, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits that transformers computes for each row."""
    auto, known = transformers.AutoModelForSequenceClassification, {"dtype": torch.float32, "num_labels": 3}
    model = auto.from_pretrained(folder, **known, attn_implementation="eager")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    assert isinstance(model, peft.PeftModelForSequenceClassification) == (adapter is not None)
    with torch.no_grad():
        return torch.cat([model.eval()(row[None]).logits for row in tokens])


@pytest.mark.filterwarnings("ignore:.*were not initialized")
def test_a_head_with_an_adapter_goes_to_peft_merged_and_not_and_comes_back(pool: Pool, tmp_path: Path) -> None:
    """The base is a language model, so its head starts at random on either side."""
    hf, adapter, layout = tmp_path / "hf", LORA | {"targets": ["q_proj", "v_proj", "fc1"]}, Layout(tp=2, pp=2)
    save("llama", hf, torch.float32, **LAYERS)

    def config(run: str, **changes: Any) -> Config:
        user = run_config(hf, tmp_path / run, adapter | changes)
        given = user.model_dump()
        given["model"]["num_labels"], given["loss"]["function"] = 3, "classification"
        return Config.model_validate(given)

    def last(ranks: list[Any]) -> NDArray[np.float32]:
        (first, *others) = [rank[:, -1] for rank in ranks if rank is not None]
        assert all(np.array_equal(first, other) for other in others), "every rank of TP has the whole head"
        found: NDArray[np.float32] = first
        return found

    user = config("run")
    tokens = random_tokens(user.model.vocab_size)
    ranks = pool.run(peft_ranks.saved, layout, user, tokens.numpy())
    ours = last([rank.logits for rank in ranks])
    assert np.abs(ours).max() > 1e-3, "the head is drawn"
    export_adapter(tmp_path / "run", tmp_path / "adapter", None)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert_close(ours, judged(hf, tmp_path / "adapter", tokens))
    export_hf(tmp_path / "run", tmp_path / "merged", None, None, num_workers=1)
    assert_close(ours, judged(tmp_path / "merged", None, tokens))
    base = {name: each for name, each in tensors_in(hf).items() if name != "lm_head.weight"}
    for rank in ranks:
        assert rank.streamed["adapter"] == bits(tensors_in(tmp_path / "adapter"))
        assert rank.streamed["merged"] == bits(tensors_in(tmp_path / "merged"))
        assert rank.streamed["base"] == bits(base)

    again = config("again", path=str(tmp_path / "adapter"))
    assert_close(last(pool.run(peft_ranks.started, Layout(), again, tokens.numpy())), torch.from_numpy(ours))
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForSequenceClassification.from_pretrained(hf, dtype=torch.float32, num_labels=3),
        tmp_path / "adapter",
    )
    theirs.save_pretrained(tmp_path / "of-peft")
    there = json.loads((tmp_path / "of-peft" / "adapter_config.json").read_text())["modules_to_save"]
    assert set(there) == {"classifier", "score"}, "PEFT's own addition"
    third = config("third", path=str(tmp_path / "of-peft"))
    assert_close(last(pool.run(peft_ranks.started, Layout(dp=2), third, tokens.numpy())), torch.from_numpy(ours))


def test_no_two_patterns_name_one_module(tmp_path: Path) -> None:
    """PEFT takes the first that matches; a file has them in the order of their names."""
    save("deepseek", tmp_path, torch.float32)
    targets = ["qkv", "proj", "fc1", "fc2", "experts"]
    user = run_config(tmp_path, tmp_path / "run", {"targets": targets, "rank_pattern": {"fc2": 2, "experts": 3}})
    assert user.adapter is not None
    family = family_of_run(user)
    saved = json.loads(json.dumps(config_of(family, user.model, user.adapter, None), sort_keys=True))
    paths = {path_in_model(each): each.matrix.part for each in tensors(family, user.model, user.adapter)}
    for path, part in paths.items():
        key = get_pattern_key(saved["rank_pattern"], path)
        assert saved["rank_pattern"].get(key, saved["r"]) == user.adapter.rank_of(part), path
    assert {path.rpartition("mlp.")[2] for path, part in paths.items() if part in ("fc2", "experts")} >= {
        "down_proj",
        "shared_experts.down_proj",
        "experts.down_proj",
    }


@pytest.mark.parametrize("scaling", ["standard", "rslora"])
def test_patterns_of_peft_start_a_run(pool: Pool, tmp_path: Path, scaling: str) -> None:
    """The first pattern that matches counts, also where a later one does; names are ends of paths."""
    hf, folder = tmp_path / "hf", tmp_path / "adapter"
    save("llama", hf, torch.float32, **LAYERS)
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
    ranks = {"[qk]_proj": 2, "k_proj": 6, "down_proj": 3}  # in the order of names, in which PEFT saves them
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=targets,
        rank_pattern=ranks,
        alpha_pattern={"v_proj": 9, ".*q_proj": 2},
        use_rslora=scaling == "rslora",
        init_lora_weights=False,
    )
    model = peft.get_peft_model(loaded(hf), settings)
    model.save_pretrained(folder)
    plain = run_config(hf, tmp_path / "run", {"rank": 4, "alpha": 6})
    section = adapter_of(folder, family_of_run(plain), plain.model)
    assert {part: section.rank_of(part) for part in section.parts} == {"q_proj": 2, "k_proj": 2, "v_proj": 4, "fc2": 3}
    adapter = {"rank": 4, "alpha": 6, "targets": targets, "path": str(folder), "scaling": scaling}
    adapter |= {"rank_pattern": {"q_proj": 2, "k_proj": 2, "down_proj": 3}, "alpha_pattern": {"v_proj": 9, "q_proj": 2}}
    user = run_config(hf, tmp_path / "run", adapter)
    tokens = random_tokens(user.model.vocab_size)
    found = pool.run(peft_ranks.started, Layout(tp=2, sp=True), user, tokens.numpy())
    assert_close(whole(found, user.model.vocab_size), logits_of(model, tokens))
    content = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(content | {"rank_pattern": {r"layers\.1\..*": 2}}))
    with refuses(DataError, "rank_pattern"):
        adapter_of(folder, family_of_run(plain), plain.model)
    with refuses(ConfigError, "adapter.rank_pattern", "layers.1.q_proj"):
        run_config(hf, tmp_path / "run", {"rank_pattern": {"layers.1.q_proj": 2}})
    with refuses(ConfigError, "adapter.rank_pattern", "v_proj"):
        run_config(hf, tmp_path / "run", {"targets": ["q_proj"], "rank_pattern": {"v_proj": 2}})


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_that_peft_saved_starts_a_run(pool: Pool, tmp_path: Path, kind: str) -> None:
    """PEFT saves the frozen tables with the adapters on them."""
    hf, folder = tmp_path / "hf", tmp_path / "adapter"
    save("llama", hf, torch.float32, **LAYERS)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"] + (["embed_tokens"] if kind == "lora" else [])
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_dora=kind == "dora", use_rslora=True, init_lora_weights=False
    )
    model = peft.get_peft_model(loaded(hf), settings)
    model.save_pretrained(folder)
    adapter = {"kind": kind, "rank": 4, "alpha": 6, "scaling": "rslora", "targets": targets, "path": str(folder)}
    user = run_config(hf, tmp_path / "run", adapter)
    tokens = random_tokens(user.model.vocab_size)
    found = pool.run(peft_ranks.started, Layout(tp=2, sp=True), user, tokens.numpy())
    assert_close(whole(found, user.model.vocab_size), logits_of(model, tokens))


@pytest.mark.fault(
    "folders",
    "a folder of PEFT with another adapter than the run's",
    happens="every setting and tensor that differs is named; nothing is loaded",
    exit_code=3,
)
def test_another_adapter_than_the_runs_is_refused_by_name(tmp_path: Path, notice: Notice) -> None:
    hf, folder = tmp_path / "hf", tmp_path / "adapter"
    save("llama", hf, torch.float32, **LAYERS)
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"])
    peft.get_peft_model(loaded(hf), settings).save_pretrained(folder)

    def refusal(adapter: dict[str, Any]) -> str:
        user = run_config(hf, tmp_path / "run", adapter)
        assert user.adapter is not None
        with notice, pytest.raises(DataError) as caught:
            PeftFolder(folder, family_of_run(user), user.model, user.adapter)
        return str(caught.value)

    other = refusal({"rank": 8, "alpha": 6, "scaling": "rslora", "targets": ["q_proj"]})
    assert "r=4, but adapter.rank=8" in other
    assert "use_rslora=False, but adapter.scaling=rslora" in other
    missing = refusal({"rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj"]})
    assert "it lacks base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight" in missing
    content = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(content | {"rank_pattern": {"q_proj": 2}}))
    plain = {"rank": 4, "alpha": 6, "targets": ["q_proj"]}
    assert "r=2 of model.layers.0.self_attn.q_proj, but adapter.rank=4" in refusal(plain)
    (folder / "adapter_config.json").write_text(json.dumps(content | {"rank_pattern": {r"layers\.1\..*": 2}}))
    assert "r=2 of model.layers.1.self_attn.q_proj, but adapter.rank=4" in refusal(plain)
    (folder / "adapter_config.json").write_text(json.dumps(content | {"layers_to_transform": [1]}))
    assert "layers_to_transform=[1], which mtrain does not support" in refusal(plain)
    assert notice.exit_code == 3
