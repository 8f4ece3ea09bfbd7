"""A text model inside a model of images and text: text is trained, all else travels bit for bit."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.config.load import save_config
from mtrain.config.schema.adapter import LoraSection
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens, verify_hf
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.training import transformers_logits
from mtrain.hf.schema import peft
from mtrain.hf.schema.description import described_model, read_model
from mtrain.hf.schema.files import as_declared, declared_ends
from mtrain.hf.schema.registry import family_of
from tests.core.state import checkpoint_ranks
from tests.hf import hf_ranks
from tests.hf.folders import TOWERS, class_of, content_of, run_of_folder, save
from tests.hf.stored import store
from tests.messages import refuses
from tests.pool import Pool

CARRIED = "hf/carried.safetensors"
BY_NIGHT = ("qwen3-vl-images", "qwen3-vl-moe-images", "gemma3-images", "ministral3-images", "qwen3.5-images")
"""Models whose tensors and fields are named as those of mistral3 and qwen3.5-moe-images."""
EACH_TOWER = [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in TOWERS]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    content = HfFolder(folder)
    return {name: content.tensor(name).clone() for name in content.names()}


def of_images(name: str) -> bool:
    parts = (
        "vision_tower",
        "multi_modal_projector",
        "mm_projector",
        "visual.",
        "audio_tower",
        "embed_vision",
        "embed_audio",
    )
    return any(part in name for part in parts)


def flip(path: Path) -> None:
    """Flips the lowest bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", EACH_TOWER)
def test_names_as_they_are_in_memory_come_back(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "usual")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB", save_original_format=False)
    assert HfFolder(tmp_path / "theirs").names() >= {"model.language_model.norm.weight"}
    if "qwen" not in name and "gemma4" not in name:  # published as in memory
        assert HfFolder(tmp_path / "usual").names() >= {"language_model.model.norm.weight"}
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    # the same model, whatever its tensors are called
    verify_hf(tmp_path / "ours", tmp_path / "theirs", num_workers=1)


@pytest.mark.parametrize("name", EACH_TOWER)
def test_a_cast_is_one_of_text(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", torch.float32, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    theirs, back = state_of(tmp_path / "theirs"), state_of(tmp_path / "back")
    assert theirs.keys() == back.keys()
    for key, value in theirs.items():
        wanted = value if of_images(key) else value.float()
        assert back[key].dtype == wanted.dtype, key
        assert torch.equal(back[key], wanted), key
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    said = [part["dtype"] for part in (config, config["text_config"], config["vision_config"])]
    assert said == ["float32", "float32", "bfloat16"]


@pytest.mark.parametrize("start", ["folder", "import"])
@pytest.mark.parametrize(
    "name",  # the others come back by day, above
    [each if each == "mistral3" else pytest.param(each, marks=pytest.mark.nightly) for each in TOWERS],
)
def test_a_run_changes_text_alone(name: str, start: str, pool: Pool, tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    save(name, theirs)
    import_hf(theirs, tmp_path / "ours", None, num_workers=1)
    config = run_of_folder(theirs, run, 3, tmp_path / "ours" if start == "import" else None)
    if start == "folder":
        started = pool.run(hf_ranks.started_weights, Layout(), config)[0]
        imported = pool.run(hf_ranks.weights, Layout(), tmp_path / "ours", config)[0]
        for key, value in imported.items():
            np.testing.assert_array_equal(started[key], value, err_msg=key)
    run.mkdir()
    save_config(config, run / "config.yaml")
    pool.run(checkpoint_ranks.train, Layout(), config, run / "checkpoints", None, 2, 1)
    proof = export_hf(run, tmp_path / "back", None, None, num_workers=2)

    before, after = state_of(theirs), state_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert proof.num_tensors == len(before)
    assert {key for key, value in before.items() if torch.equal(value, after[key])} == set(filter(of_images, before))
    assert verify_hf(run, tmp_path / "back", num_workers=1) == proof
    read = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    again = class_of(read).from_pretrained(tmp_path / "back", dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = again(random_tokens(57)).logits.numpy()
    ours = pool.run(hf_ranks.logits, Layout(), run / "checkpoints" / "step_00000001", False)[0]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_what_predicts_further_ahead_travels(tmp_path: Path) -> None:
    """transformers leaves these tensors of Qwen3-Next and Qwen3.5 unread, too."""
    save("qwen3-next", tmp_path / "theirs", max_shard_size="1GB")
    file = tmp_path / "theirs" / "model.safetensors"
    ahead = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32)}
    save_file(load_file(file) | ahead, file, metadata={"format": "pt"})
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    export_hf(tmp_path / "ours", tmp_path / "wide", None, torch.float32, num_workers=1)
    wide = state_of(tmp_path / "wide")
    assert all(torch.equal(wide[name], value) and wide[name].dtype == value.dtype for name, value in ahead.items())
    assert wide["model.norm.weight"].dtype == torch.float32


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    save("gemma3-images", tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    last = sorted((tmp_path / "back").glob("*.safetensors"))[-1]
    assert list(HfFolder(tmp_path / "back").files[last.name].entries)[-1] == "vision_tower.post_layernorm.weight"
    flip(last)
    with pytest.raises(DataError) as differs:
        verify_hf(tmp_path / "ours", tmp_path / "back", num_workers=1)
    assert str(differs.value).startswith("1 of ")
    assert str(differs.value).endswith(": vision_tower.post_layernorm.weight")
    flip(tmp_path / "ours" / CARRIED)
    with pytest.raises(DataError) as damaged:
        export_hf(tmp_path / "ours", tmp_path / "again", None, None, num_workers=1)
    assert CARRIED in str(damaged.value)


def test_a_folder_with_other_tensors_of_images_is_another_model(tmp_path: Path) -> None:
    save("gemma3-images", tmp_path / "theirs", max_shard_size="1GB")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    last = state.pop("vision_tower.post_layernorm.weight")
    for changed in (state, state | {"vision_tower.post_layernorm.weight": last, "vision_tower.more": last.clone()}):
        save_file(changed, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError, match=r"vision_tower\.(post_layernorm\.weight|more)"):
            verify_hf(tmp_path / "ours", tmp_path / "theirs", num_workers=1)


@pytest.mark.parametrize(
    ("said", "has_head"), [({}, True), ({"tie_word_embeddings": True}, True), ({}, False)], ids=repr
)
def test_a_stored_head_counts(said: dict[str, Any], has_head: bool, pool: Pool, tmp_path: Path) -> None:
    """Mistral Small is published with a head and without the outer field, whose default is true."""
    save("mistral3", tmp_path / "theirs", max_shard_size="1GB")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | said))
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    if not has_head:
        del state["language_model.lm_head.weight"]
        save_file(state, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    assert described_model(tmp_path / "theirs").tied_embeddings is not has_head
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    if not has_head:  # without this field transformers 4 would draw a head at random
        config = json.loads((tmp_path / "back" / "config.json").read_text())
        assert config["text_config"].pop("tie_word_embeddings")
    for file in (tmp_path / "theirs").iterdir():
        if has_head or file.name != "config.json":
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    expected = transformers_logits(tmp_path / "theirs", random_tokens(57)).numpy()
    ours = pool.run(hf_ranks.logits, Layout(), tmp_path / "ours")[0]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


TIED = "tie_word_embeddings"
SAID = (None, False, True)
OWN, COPY, NONE = "own", "copy", "none"
"""Stored heads: a table of its own, the embeddings once more, and none."""


def saying(config: dict[str, Any], outer: bool | None, nested: bool | None) -> dict[str, Any]:
    """Returns a config.json with these fields, without one for None."""

    def changed(part: dict[str, Any], said: bool | None) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key != TIED} | ({} if said is None else {TIED: said})

    return changed(config, outer) | {"text_config": changed(config["text_config"], nested)}


def tying(config: dict[str, Any]) -> tuple[bool, bool]:
    """Returns whether transformers 5 and 4 tie a folder's tables."""
    if config["model_type"].startswith("qwen3_vl"):  # 5.24 has another default than 4.57, or none
        config = config | {"text_config": {TIED: False} | config["text_config"]}
    read = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    return getattr(read, TIED), getattr(read.text_config, TIED)


def heads(config: dict[str, Any], stored: str) -> tuple[str, str]:
    """Returns what transformers 5 and 4 take for the head of a folder; NONE where it would be drawn at random."""
    in_5, in_4 = tying(config)
    return COPY if stored == NONE and in_5 else stored, COPY if in_4 else stored


@pytest.mark.parametrize("name", EACH_TOWER)
def test_a_config_says_to_both_versions_whether_tables_are_tied(name: str) -> None:
    """transformers 5 reads the outer field, transformers 4 the nested one."""
    stored_as = "lm_head.weight" if "qwen" in name or "gemma4" in name else "language_model.lm_head.weight"
    for outer, nested, stored in itertools.product(SAID, SAID, (OWN, COPY, NONE)):
        case, theirs = (outer, nested, stored), saying(content_of(name), outer, nested)
        family = family_of(theirs)
        model = family.model(family.as_held(theirs, () if stored == NONE else (stored_as,)))
        if stored == (OWN if model.tied_embeddings else NONE):
            continue  # refused: another head than the one it is tied to, or a head that is not there
        meant, _ = heads(theirs, stored)
        same = family.config(model, theirs)
        assert heads(same, stored) == (meant, meant), case
        assert same in (theirs, saying(theirs, outer, model.tied_embeddings)), case
        changed = family.for_all_versions(same)
        assert tying(changed) == (model.tied_embeddings, model.tied_embeddings), case


@pytest.mark.parametrize("name", EACH_TOWER)
def test_a_head_beside_a_nested_field_that_ties_it_is_read_by_both_versions(name: str, tmp_path: Path) -> None:
    """transformers 5 writes such folders."""
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    save(name, theirs, max_shard_size="1GB")
    config = json.loads((theirs / "config.json").read_text())
    state = load_file(theirs / "model.safetensors")
    embeddings = next(key for key in state if key.endswith("embed_tokens.weight"))
    head = f"{'language_model.' if embeddings.startswith('language_model.') else ''}lm_head.weight"
    save_file(state | {head: state[embeddings].flip(0)}, theirs / "model.safetensors", {"format": "pt"})
    (theirs / "config.json").write_text(json.dumps(saying(config, False, True)))
    import_hf(theirs, tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", back, None, None, num_workers=1)
    assert (back / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    said = json.loads((back / "config.json").read_text())
    assert said == saying(said, False, False)


def test_a_text_model_has_the_name_that_it_is_published_with(tmp_path: Path) -> None:
    """transformers reads kimi_k2 as deepseek_v3; the file keeps its word."""
    theirs = tmp_path / "theirs"
    save("kimi-k2.5", theirs, max_shard_size="1GB")
    config = json.loads((theirs / "config.json").read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    (theirs / "config.json").write_text(json.dumps(config, indent=2))
    assert transformers.AutoConfig.from_pretrained(theirs).text_config.model_type == "deepseek_v3"
    import_hf(theirs, tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    for file in theirs.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


def transposed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transposes the matrices of all experts, as Qwen3-VL is published: transformers 5 saves them as they are in
    memory."""
    return {name: value.transpose(1, 2).contiguous() if ".experts." in name else value for name, value in state.items()}


@pytest.mark.parametrize("is_published", [False, True], ids=["as in memory", "as published"])
def test_fused_experts_come_back_in_the_form_in_which_they_came(is_published: bool, pool: Pool, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save("qwen3-vl-moe-images", theirs, torch.float32, max_shard_size="1GB")
    file = theirs / "model.safetensors"
    if is_published:
        save_file(transposed(load_file(file)), file, {"format": "pt"})
    import_hf(theirs, tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    for each in theirs.iterdir():
        assert (tmp_path / "back" / each.name).read_bytes() == each.read_bytes(), each.name
    expected = transformers_logits(theirs, random_tokens(57)).numpy()
    ours = pool.run(hf_ranks.logits, Layout(), tmp_path / "ours")[0]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # other exports are in the form that transformers 4 and vLLM read, too
    export_hf(tmp_path / "ours", tmp_path / "like", theirs, None, num_workers=1)
    published = load_file(file) if is_published else transposed(load_file(file))
    assert {name: value.shape for name, value in load_file(tmp_path / "like" / file.name).items()} == {
        name: value.shape for name, value in published.items()
    }
    assert all(torch.equal(value, published[name]) for name, value in load_file(tmp_path / "like" / file.name).items())
    verify_hf(tmp_path / "ours", theirs, num_workers=1)


def test_square_matrices_of_experts_are_refused(tmp_path: Path) -> None:
    save("qwen3-vl-moe-images", tmp_path / "theirs", moe_intermediate_size=16)
    with pytest.raises(DataError, match=r"experts\.gate_up_proj has shape \[5, 32, 32\], which does not tell"):
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)


def test_images_come_from_the_folder_that_is_named(tmp_path: Path) -> None:
    """A folder of the same text model, with other images."""
    save("gemma3-images", tmp_path / "theirs", max_shard_size="1GB")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    other = {name: value + 1 for name, value in load_file(tmp_path / "theirs" / "model.safetensors").items()}
    save_file(other, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    export_hf(tmp_path / "ours", tmp_path / "back", tmp_path / "theirs", None, num_workers=1)
    before, after = (state_of(tmp_path / name) for name in ("theirs", "back"))
    assert {key for key, value in before.items() if torch.equal(value, after[key])} == set(filter(of_images, before))
    (tmp_path / "theirs" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has neither model\.safetensors nor"):
        export_hf(tmp_path / "ours", tmp_path / "again", tmp_path / "theirs", None, num_workers=1)


def test_an_adapter_is_one_of_text(tmp_path: Path) -> None:
    save("gemma3-images", tmp_path / "theirs")
    family, model = read_model(tmp_path, json.loads((tmp_path / "theirs" / "config.json").read_text()), ())
    adapter = LoraSection(rank=2)
    (tmp_path / "adapter").mkdir()
    state = {each.name: torch.randn(each.shape) for each in peft.tensors(family, model, adapter)}
    save_file(state, tmp_path / "adapter" / peft.TENSORS_NAME)
    content = peft.config_of(family, model, adapter, None)
    (tmp_path / "adapter" / peft.CONFIG_NAME).write_text(json.dumps(content))
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "theirs")
    found = PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()
    loaded = {name.replace(".default", ""): value for name, value in found.items() if "lora" in name}
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name


def test_a_head_of_sequences_has_no_form(tmp_path: Path) -> None:
    save("gemma3-images", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    family, model = read_model(tmp_path, config, ())
    with pytest.raises(DataError, match=r"gemma3.* cannot express: model\.num_labels=2"):
        family.config(model.model_copy(update={"num_labels": 2}), config)


def test_an_answer_ends_where_the_text_model_says(tmp_path: Path) -> None:
    for outer in ({}, {"eos_token_id": [3, 4]}):
        config = {"model_type": "gemma3", "text_config": {"eos_token_id": 7}, **outer}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read = transformers.AutoConfig.from_pretrained(tmp_path)
        expected = transformers.GenerationConfig.from_model_config(read).eos_token_id
        assert as_declared(declared_ends(tmp_path)) == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text_config": None}, "text_config=None is null, but an object is needed"),
    ({"text_config": {"model_type": "qwen3"}}, "text_config of model_type='qwen3' is not supported in a gemma3 model"),
    ({"tie_word_embeddings": False}, "lacks language_model.lm_head.weight"),
    ({"model_type": "llava"}, "model_type='llava' is not supported"),
]


@pytest.mark.parametrize(("changes", "reported"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], reported: str, tmp_path: Path) -> None:
    save("gemma3-images", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(DataError) as refused:
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    assert reported in str(refused.value)


@pytest.mark.parametrize("inside", [True, False])
def test_codes_of_a_quantisation_are_named_and_not_missed(inside: bool, tmp_path: Path) -> None:
    """Kimi-K2.5 is published in INT4, which its text_config says, and three tensors stand for each matrix."""
    theirs = tmp_path / "theirs"
    save("kimi-k2.5", theirs, max_shard_size="1GB")
    state = load_file(theirs / "model.safetensors")
    for name in [name for name in state if ".experts." in name]:
        rows, columns = state.pop(name).shape
        state[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        state[f"{name}_scale"], state[f"{name}_shape"] = torch.ones(rows, 1), torch.tensor([rows, columns])
    save_file(state, theirs / "model.safetensors", {"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    said = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    config |= {"text_config": config["text_config"] | said} if inside else said
    (theirs / "config.json").write_text(json.dumps(config))
    with refuses(DataError, "compressed-tensors", "pack-quantized", "bfloat16"):
        import_hf(theirs, tmp_path / "ours", None, num_workers=1)


def test_weights_in_few_bits_are_refused(tmp_path: Path) -> None:
    save("gemma3-images", tmp_path / "theirs", max_shard_size="1GB")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    store(tmp_path / "fp8", load_file(tmp_path / "theirs" / "model.safetensors"), config, "fp8", "whole")
    with pytest.raises(DataError, match="is a quantised gemma3 model, but models with images"):
        import_hf(tmp_path / "fp8", tmp_path / "ours", None, num_workers=1)
