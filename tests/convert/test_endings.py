"""Tokens that end an answer of an exported chat model, by transformers and by the run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from mtrain.config.schema.model import ModelSection
from mtrain.convert.endings import ends_next_to, put_ending
from mtrain.data.chat.encoder import ChatEncoder, ChatOptions
from mtrain.data.chat.template import chosen_templates, put_templates
from mtrain.data.encoding.plain import PLAIN_TEMPLATE
from mtrain.hf.schema.files import declared_ends
from mtrain.hf.tokenizer.tokenizer import load_tokenizer

MODEL = ModelSection(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=8, vocab_size=12)
WORDS = ["<unk>", "user", "assistant", "system", "a", "b", "c", "<eos>", "<end>", "<eom>", "\n", "###"]
EOS, END, EOM = (WORDS.index(word) for word in ("<eos>", "<end>", "<eom>"))
ASK = "{% if add_generation_prompt %}assistant {% endif %}"
TEMPLATES = {
    "turns": "{% for m in messages %}{{ m.role }} {{ m.content }} <end>\n{% endfor %}" + ASK,
    "document": "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}" + ASK,
    "both": "{{ eos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} <end>\n{% endfor %}" + ASK,
    "marked": "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    " <end>\n{% endgeneration %}{% else %}{{ m.content }} <end>\n{% endif %}{% endfor %}" + ASK,
    "open": "{% for m in messages %}{{ m.role }} {{ m.content }} \n{% endfor %}" + ASK,
    "system first": "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} <end>\n{% endfor %}" + ASK,
    "tools apart": "{% for m in messages %}{{ m.role }} {{ m.content }} <end>\n{% endfor %}" + ASK,
    "next one": "{% for m in messages %}{{ '<end> ' if m.role == 'user' else '<eom> ' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<eom> {% endif %}",
    "thoughts": "{% for m in messages %}{{ m.role }} {% if m.reasoning_content %}{{ m.reasoning_content }} <eom> "
    "{% endif %}{{ m.content }} <end>\n{% endfor %}" + ASK,
    "plain": PLAIN_TEMPLATE,
}
LAST = dict.fromkeys(TEMPLATES, END) | {"document": EOS, "open": EOS, "plain": EOS}
"""End that each template teaches."""


def save_tokenizer(folder: Path, named: dict[str, Any], specials: list[str]) -> None:
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>", **named})
    )


def base_model(folder: Path, generation: dict[str, Any] | None, eos: int | list[int] | None) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=len(WORDS), eos_token_id=eos, bos_token_id=None, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


class Says(LogitsProcessor):
    """Processor that lets each row say its token between others."""

    def __init__(self, said: torch.Tensor, start: int) -> None:
        self.said, self.start = said, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self.said[:, input_ids.shape[1] - self.start]
        return torch.full_like(scores, -1e9).scatter(1, chosen[:, None], 0.0)


def ends_of_transformers(folder: Path) -> set[int]:
    """Finds each token at which generate ends, by trial: a row says it as its second token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    asked = torch.tensor([ids] * len(WORDS))
    said = torch.tensor([[4, id_, 5, 6] for id_ in range(len(WORDS))])
    says = LogitsProcessorList([Says(said, len(ids))])
    new = model.generate(asked, max_new_tokens=4, do_sample=False, logits_processor=says, pad_token_id=0)[:, len(ids) :]
    return {id_ for id_ in range(len(WORDS)) if new[id_].tolist() != said[id_].tolist()}


def exported(folder: Path, out: Path, template: str) -> Path:
    """Exports the files of a base model."""
    out.mkdir()
    for file in (each for each in folder.iterdir() if each.is_file()):
        (out / file.name).write_bytes(file.read_bytes())
    files = {"chat_template.jinja": TEMPLATES[template]}
    if template == "tools apart":
        files["additional_chat_templates/tool_use.jinja"] = TEMPLATES[template].replace("<end>", "<eom>")
    put_templates(files, out)
    ending = put_ending(out, folder, MODEL)
    assert ending is not None
    config = json.loads((out / "config.json").read_text())
    if ending.is_new:
        (out / "config.json").write_text(json.dumps({**config, "eos_token_id": ending.ids}))
    return out


def own_ends(out: Path, folder: Path) -> set[int]:
    """Returns the tokens at which `mtrain generate` ends the run's answers: with its tokenizer and the model from which
    it began."""
    tokenizer, templates = load_tokenizer(folder), chosen_templates("auto", out / "tokenizer.json")
    assert templates is not None
    if templates.default.text == PLAIN_TEMPLATE:
        return {tokenizer.eos_id, *declared_ends(folder)}
    return {*ChatEncoder(templates, tokenizer, ChatOptions(date="2026-11-25")).stop_ids(), *declared_ends(folder)}


BASES: list[tuple[dict[str, Any] | None, int | list[int] | None]] = [
    (None, EOS),
    (None, [EOS, EOM]),
    (None, None),
    ({"eos_token_id": [EOM], "temperature": 0.5, "do_sample": True}, EOS),
    ({"eos_token_id": EOS}, EOS),
    ({"eos_token_id": [END, EOS]}, EOS),
    ({"max_new_tokens": 7}, EOS),
]


@pytest.mark.parametrize(
    ("template", "bases"),
    [
        *((template, [BASES[number % len(BASES)]]) for number, template in enumerate(TEMPLATES)),
        *(pytest.param(template, BASES, marks=pytest.mark.nightly) for template in TEMPLATES),
    ],
    ids=[*TEMPLATES, *(f"{template}, each base" for template in TEMPLATES)],
)
def test_an_export_ends_where_the_run_ends(
    template: str, bases: list[tuple[dict[str, Any] | None, int | list[int] | None]], tmp_path: Path
) -> None:
    """The templates share the bases by day; the test below puts drawn templates on drawn bases."""
    for number, (generation, eos) in enumerate(bases):
        folder = tmp_path / str(number)
        folder.mkdir()
        base_model(folder, generation, eos)
        save_tokenizer(folder, {}, ["<eos>", "<end>", "<eom>"])
        out = exported(folder, tmp_path / f"{number}-out", template)
        assert ends_of_transformers(out) == own_ends(out, folder), (generation, eos)
        assert LAST[template] in own_ends(out, folder)
        assert own_ends(out, folder) <= {*ends_next_to(out), EOS, *declared_ends(folder)}, "so does a service"
        if generation is not None:
            said = json.loads((out / "generation_config.json").read_text())
            assert {**generation, "eos_token_id": said.get("eos_token_id")}.items() >= said.items(), "the rest stays"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    base=st.sampled_from(BASES),
    specials=st.sets(st.sampled_from(["<eos>", "<end>", "<eom>"])),
    eos_form=st.sampled_from(["text", "object"]),
    map_file=st.booleans(),
    extra=st.sampled_from([None, ["<end>"], ["<end>", "<eom>"]]),
)
def test_names_of_the_end_keep_every_id(
    tmp_path_factory: pytest.TempPathFactory,
    template: str,
    base: tuple[dict[str, Any] | None, int | list[int] | None],
    specials: set[str],
    eos_form: str,
    map_file: bool,
    extra: list[str] | None,
) -> None:
    """The sets agree wherever special tokens are declared, the tokenizer's own end is among them, texts keep ids."""
    folder = tmp_path_factory.mktemp("ends")
    as_object = {"__type": "AddedToken", "content": "<eos>", "lstrip": False, "rstrip": False, "normalized": False}
    named: dict[str, Any] = {"eos_token": "<eos>" if eos_form == "text" else {**as_object, "single_word": False}}
    named |= {} if extra is None else {"additional_special_tokens": extra}
    save_tokenizer(folder, named, sorted(specials))
    if map_file:
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    generation, eos = base
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    out = exported(folder, folder / "out", template)
    before, after = (AutoTokenizer.from_pretrained(str(each)) for each in (folder, out))
    ends = own_ends(out, folder)
    assert set(declared_ends(out)) == ends
    assert after.eos_token_id in ends
    for text in ("a b<end>\n", "<eos> a<eos>b <eom>", "###  <end>c"):
        assert before(text)["input_ids"] == after(text)["input_ids"]
        assert before.decode(before(text)["input_ids"], skip_special_tokens=True) == after.decode(
            after(text)["input_ids"], skip_special_tokens=True
        )


def test_a_chat_model_keeps_its_files(tmp_path: Path) -> None:
    """The model already names the end of a turn."""
    base_model(tmp_path, {"eos_token_id": [END, EOS]}, EOS)
    save_tokenizer(tmp_path, {}, ["<eos>", "<end>"])
    out = exported(tmp_path, tmp_path / "out", "turns")
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_declared_end_inside_of_answers_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The template writes <eom> between a thought and its answer, where transformers stops."""
    for name, ids, is_named in (("early", [END, EOM], True), ("right", [END, EOS], False)):
        folder = tmp_path / name
        folder.mkdir()
        base_model(folder, {"eos_token_id": ids}, EOS)
        save_tokenizer(folder, {}, ["<eos>", "<end>", "<eom>"])
        caplog.clear()
        exported(folder, folder / "out", "thoughts")
        noted = [record.getMessage() for record in caplog.records if "inside answers" in record.getMessage()]
        assert len(noted) == is_named
        assert all("<eom>" in each and str(folder) in each for each in noted)
