"""Runs that add tokens, judged by a folder in which transformers has added them: `resize_token_embeddings`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.convert.adapters import export_adapter
from mtrain.convert.exporting import export_hf
from mtrain.data.formats.documents import TextFiles
from mtrain.data.preparation.train_tokenizer import train_hf_tokenizer
from mtrain.hf.configuration import load_config
from mtrain.hf.tokenizer.tokenizer import load_tokenizer, tokenizer_of
from mtrain.verify.core.samples import SamplePlan
from mtrain.verify.core.texts import texts_of
from mtrain.verify.hf import comparable, verify_hf
from mtrain.verify.parity import Request
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh

PLAIN, SPECIAL = ["<search>", "</search>"], ["<|note|>"]
KEYS = {"add_tokens": PLAIN, "add_special_tokens": SPECIAL}
TEMPLATE = (
    "{% for message in messages %}<|note|>{{ message.role }}:{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
TEXTS = ["a reader is a writer.", "<search>an index</search> is a value.", "what is <|note|>?"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY, SPARE = 280, 2
ADDED = len(PLAIN) + len(SPECIAL)


IDS = ["untied", "tied, with spare rows"]


@pytest.fixture(scope="module", params=[False, True], ids=IDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model with its tokenizer, and the folder that transformers makes of both with the new tokens."""
    folder = tmp_path_factory.mktemp("added")
    words = ["reader", "writer", "index", "value"]
    lines = [f"a {word} is <search>a {other}</search>." for word in words for other in words]
    (folder / "text.txt").write_text("\n".join(lines * 4).replace("<search>", "").replace("</search>", ""))
    train_hf_tokenizer(TextFiles([folder / "text.txt"]), folder / "hf", VOCABULARY, chat_template="chatml")
    (folder / "template.jinja").write_text(TEMPLATE)
    torch.manual_seed(3)
    rows = VOCABULARY + (SPARE if request.param else 0)
    settings = LlamaConfig(
        **SIZES, vocab_size=rows, eos_token_id=0, bos_token_id=None, tie_word_embeddings=bool(request.param)
    )
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "hf"))
    tokenizer.add_tokens(PLAIN)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    assert len(tokenizer) == VOCABULARY + ADDED
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for table in {
            id(each): each for each in (model.get_input_embeddings(), model.get_output_embeddings())
        }.values():
            table.weight[VOCABULARY:] = table.weight[:VOCABULARY].double().mean(0).float()
    model.save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(str(folder / "theirs"))
    dialogues = [
        {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": line}]} for line in lines
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in dialogues))
    return folder


def config_of(folder: Path, run: str, hf: str = "hf", **sections: Any) -> Config:
    data = {"kind": "sft", "seq_length": 64, "packing": {}, "tokenizer": str(folder / hf)}
    data |= {"cache_dir": str(folder / "cache"), "train": [{"path": str(folder / "chat.jsonl")}]}
    content: dict[str, Any] = {
        "run": {"dir": str(folder / run)},
        "model": {"hf": str(folder / hf), "vocab_multiple": 8, **(KEYS if hf == "hf" else {})},
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "num_steps": 2, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "data": {**data, "chat_template": str(folder / "template.jinja")},
        "metrics": {"tensorboard": False},
    }
    for name, changes in sections.items():
        content[name] = {**content.get(name, {}), **changes}
    return load_config([], [f"{name}={json.dumps(value)}" for name, value in content.items()])


def trained(pool: Pool, config: Config, layout: Layout) -> list[tuple[float, float]]:
    """Trains a run; returns loss and grad-norm of every step."""
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp")}
    pool.run(train_fresh, layout, config.model_copy(update={"layout": config.layout.model_copy(update=sizes)}))
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if "grad_norm" in each]
    return [(each["loss"], each["grad_norm"]) for each in steps]


def test_the_tokenizer_gives_the_ids_of_transformers(folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(str(folder / "theirs")), tokenizer_of(config_of(folder, "run"))
    for text in TEXTS:
        found = ours.encode_with_offsets(text, special_tokens=True).ids
        assert found == theirs(text, add_special_tokens=False)["input_ids"]
    assert VOCABULARY + ADDED - 1 not in ours.encode("<|note|>"), "a control token is written by templates alone"


# tied by day: the steps below
@pytest.mark.parametrize("folder", [False, pytest.param(True, marks=pytest.mark.nightly)], indirect=True, ids=IDS)
def test_runs_on_all_layouts_are_those_of_a_folder_that_transformers_resized(pool: Pool, folder: Path) -> None:
    expected = trained(pool, config_of(folder, "of theirs", "theirs"), Layout())
    given = config_of(folder, "x").model
    assert given.vocab_size == VOCABULARY + ADDED
    # tensor ranks divide the rows of a table; stages of a pipeline hold two copies of one that is tied
    for number, layout in enumerate((Layout(), Layout(pp=2) if given.tied_embeddings else Layout(tp=2))):
        found = trained(pool, config_of(folder, f"run {number}"), layout)
        assert found == [pytest.approx(step, rel=2e-6) for step in expected], layout
    # bit for bit where the arithmetic is the same
    export_hf(folder / "of theirs", folder / "out of theirs", None, None, num_workers=1)
    export_hf(folder / "run 0", folder / "out", None, None, num_workers=1)
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("out", "out of theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_a_model_that_transformers_resizes(pool: Pool, folder: Path, dtype: str) -> None:
    """`verify hf`, whose other side adds the tokens by itself, with its tokenizer and `resize_token_embeddings`."""
    if dtype != "float32":  # a mean is rounded as the rows around it are
        shutil.copytree(folder / "hf", folder / dtype, dirs_exist_ok=True)
        AutoModelForCausalLM.from_pretrained(str(folder / "hf"), dtype=dtype).save_pretrained(folder / dtype)
    name = "hf" if dtype == "float32" else dtype
    config = config_of(folder, "verified", "hf", model={"hf": str(folder / name), **KEYS, "vocab_multiple": 8})
    report = verify_hf(config, Request("tp2,pp2", 2, 2, None, "test"), print, pool)
    assert report.passed, [each for layout in report.layouts for each in layout.deviations]
    assert len(report.layouts) == 2
    texts = texts_of(comparable(config)[0], SamplePlan(2, 0, config.model.vocab_size)).steps
    assert any(VOCABULARY in text.ids for step in texts for text in step), "<search> does not occur"


# the tables of an export, by day: test_runs_on_all_layouts_...; what a run resumes: tests/core/state; the tokenizer of
# an export: test_endings.py
@pytest.mark.nightly
def test_a_run_goes_on_and_its_export_is_whole(pool: Pool, folder: Path) -> None:
    config = config_of(folder, "long")
    trained(pool, config, Layout(tp=2))
    saved = load_config([folder / "long" / "config.yaml"], ["train.num_steps=3"])
    assert saved.model == config.model
    assert trained(pool, saved, Layout(tp=2)) == trained(
        pool, config_of(folder, "once", train={"num_steps": 3}), Layout(tp=2)
    )
    export_hf(folder / "long", folder / "exported", None, None, num_workers=1)
    assert json.loads((folder / "exported" / "config.json").read_text())["vocab_size"] == VOCABULARY + ADDED
    theirs = AutoTokenizer.from_pretrained(str(folder / "exported"))
    model = AutoModelForCausalLM.from_pretrained(str(folder / "exported"))
    assert model.get_input_embeddings().weight.shape[0] == len(theirs) == VOCABULARY + ADDED
    before = AutoTokenizer.from_pretrained(str(folder / "theirs"))
    for text in TEXTS:
        assert theirs(text)["input_ids"] == before(text)["input_ids"]
        assert theirs.decode(before(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    assert {*SPECIAL} <= set(theirs.all_special_tokens) | {str(each) for each in theirs.added_tokens_decoder.values()}
    # a run that starts from the export has the tokens without the keys
    again = config_of(folder, "again", "exported")
    assert again.model.vocab_size == VOCABULARY + ADDED
    export_hf(folder / "long", folder / "like", folder / "exported", None, num_workers=1)
    assert load_tokenizer(folder / "like").fingerprint == load_tokenizer(folder / "exported").fingerprint


def test_an_adapter_trains_their_rows_and_is_merged(pool: Pool, folder: Path) -> None:
    tied = config_of(folder, "x").model.tied_embeddings
    targets = ["qkv", "embedding"] + ([] if tied else ["output"])
    if tied:
        with refuses(ConfigError, "model.tied_embeddings=true"):
            config_of(folder, "lora", adapter={"targets": targets})
        return
    with refuses(ConfigError, "embedding, output"):
        config_of(folder, "lora", adapter={"targets": ["qkv"]})
    trained(pool, config_of(folder, "lora", adapter={"targets": targets}), Layout(tp=2))
    with refuses(DataError, "--adapter"):
        export_adapter(folder / "lora", folder / "peft", None)
    export_hf(folder / "lora", folder / "merged", None, None, num_workers=1)
    table = load_file(folder / "merged" / "model.safetensors")["model.embed_tokens.weight"]
    assert len(table) == VOCABULARY + ADDED
    mean = load_file(folder / "theirs" / "model.safetensors")["model.embed_tokens.weight"][-1]
    assert not torch.equal(table[VOCABULARY], mean), "the row of <search> has learned"


# untied by day: tables that learn whole go to PEFT and back in tests/core/adapters/test_peft.py
@pytest.mark.parametrize("folder", [pytest.param(False, marks=pytest.mark.nightly), True], indirect=True, ids=IDS)
@pytest.mark.nightly  # tables go to PEFT in tests/core/adapters/test_peft.py; new rows learn: above
def test_tables_that_learn_whole_train_their_rows_beside_adapters(pool: Pool, folder: Path) -> None:
    """PEFT loads the export onto a frozen model that it has resized, tied or not."""
    adapter = {"targets": ["qkv"], "modules_to_save": ["embed_tokens", "lm_head"]}
    trained(pool, config_of(folder, "whole", adapter=adapter), Layout(tp=2))
    export_adapter(folder / "whole", folder / "of whole", None)
    export_hf(folder / "whole", folder / "merged whole", None, None, num_workers=1)
    base = AutoModelForCausalLM.from_pretrained(str(folder / "hf"))
    base.resize_token_embeddings(VOCABULARY + ADDED)
    theirs = peft.PeftModel.from_pretrained(base, folder / "of whole")
    merged = AutoModelForCausalLM.from_pretrained(str(folder / "merged whole"))
    tokens = torch.arange(VOCABULARY + ADDED)[None]
    with torch.no_grad():
        found, expected = theirs.eval()(tokens).logits, merged.eval()(tokens).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    mean = load_file(folder / "theirs" / "model.safetensors")["model.embed_tokens.weight"][-1]
    assert not torch.equal(merged.get_input_embeddings().weight[VOCABULARY], mean), "the row of <search> has learned"
    assert load_tokenizer(folder / "of whole").fingerprint == load_tokenizer(folder / "merged whole").fingerprint


def test_what_cannot_be_added_to_is_refused(folder: Path, tmp_path: Path) -> None:
    with refuses(DataError, "'<|im_end|>'", "tokenizer.json"):
        config_of(folder, "run", model={"hf": str(folder / "hf"), "add_tokens": ["<|im_end|>"]})
    with refuses(DataError, "model.add_tokens", "twice"):
        config_of(folder, "run", model={"hf": str(folder / "hf"), "add_tokens": ["<a>", "<a>"]})
    shutil.copytree(folder / "hf", tmp_path / "hf", ignore=shutil.ignore_patterns("tokenizer*"))
    with refuses(DataError, str(tmp_path / "hf")):
        config_of(folder, "run", model={"hf": str(tmp_path / "hf"), **KEYS})
    sizes = {"hf": None, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
    with refuses(ConfigError, "model.add_tokens", "checkpoint.initialize_from"):
        config_of(
            folder, "run", model={**sizes, "vocab_size": 283, **KEYS}, checkpoint={"initialize_from": str(folder)}
        )
