"""`mtrain check` refuses what `mtrain train` refuses before its first step: the same message, the same exit code.

Each case is one fault in a run that is sound otherwise. Both verbs are called on it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mtrain.convert.importing import import_hf
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.hf.schema.description import described_model
from mtrain.runs.folder import RunFolder
from tests.cli.command_line import call
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.hf.folders import CONFIGS as FAMILIES
from tests.hf.folders import save
from tests.warm import completed

SMALL = {"hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1, "vocab_size": 64}
TRAIN = {"global_batch_size": 2, "num_steps": 1, "precision": "fp32", "device": "cpu"}
BY_DAY = ("gpt-oss", "deepseek")
LINE = {"prompt": "a b", "response": "c d e"}


@dataclass(frozen=True)
class Place:
    """Files that the cases share; they write into `own` alone."""

    shared: Path
    own: Path

    @property
    def base(self) -> str:
        """Makes a run of one step with a checkpoint."""
        return str(self.shared / "base")

    @property
    def trained(self) -> dict[str, Any]:
        """Returns `data` of that run."""
        return self.indexed(str(self.shared / "corpus"))

    @property
    def hf(self) -> Path:
        """Copies a valid Hugging Face folder."""
        return Path(shutil.copytree(self.shared / "hf", self.own / "hf", dirs_exist_ok=True))

    @property
    def continued(self) -> dict[str, Any]:
        """Returns `run` of a copy of the run, which a start resumes."""
        shutil.copytree(self.base, self.own / "run", dirs_exist_ok=True)
        return {"dir": str(self.own / "run")}

    def corpus(self, num_tokens: int, name: str = "corpus") -> str:
        """Returns the prefix of a corpus of one document."""
        with writing_corpus(str(self.own / name), vocab_size=64) as writer:
            writer.add(np.arange(num_tokens) % 60)
        return str(self.own / name)

    def indexed(self, *prefixes: str, **keys: Any) -> dict[str, Any]:
        return {"kind": "indexed", "seq_length": 16, "train": [{"path": each} for each in prefixes], **keys}

    def sft(self, *lines: dict[str, Any], **keys: Any) -> dict[str, Any]:
        path = self.own / "lines.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        folder = str(self.shared / "tokenizer")
        found = {"kind": "sft", "seq_length": 16, "train": [{"path": str(path)}], "tokenizer": folder}
        return {**found, "cache_dir": str(self.own / "cache"), **keys}


class Case(NamedTuple):
    """A run with one fault."""

    code: int
    words: str
    """Words of the message."""
    sections: Callable[[Place], dict[str, Any]]
    """Sections that differ from the valid run."""
    meanwhile: Callable[[Place], AbstractContextManager[object]] = lambda place: nullcontext()


def _loss(code: int, words: str, **keys: Any) -> Case:
    return Case(code, words, lambda place: {"loss": keys})


def _start(words: str, **model: Any) -> Case:
    """Builds a case that starts from another model's weights."""
    return Case(3, words, lambda place: {"checkpoint": {"initialize_from": place.base}, "model": {**SMALL, **model}})


def _continued(code: int, words: str, **sections: Any) -> Case:
    return Case(code, words, lambda place: {"run": place.continued, "data": place.trained, **sections})


def _hf(words: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Case:
    def sections(place: Place) -> dict[str, Any]:
        path = place.hf / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})
        return {"model": {"hf": str(path.parent)}}

    return Case(3, words, sections)


def _without_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)


def _narrower(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def _cut_file(place: Place) -> dict[str, Any]:
    path = place.hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return {"model": {"hf": str(path.parent)}}


def _adapter(place: Place) -> dict[str, Any]:
    folder = place.own / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    return {"model": {"hf": str(place.hf)}, "adapter": {"kind": "lora", "rank": 8, "path": str(folder)}}


@contextlib.contextmanager
def _in_use(place: Place) -> Iterator[None]:
    folder = RunFolder(place.own / "run")
    folder.create()
    with folder.locked():
        yield


def _damaged(place: Place) -> dict[str, Any]:
    run = place.continued
    for path in Path(run["dir"]).glob("checkpoints/step_*/mtrain.json"):
        path.write_text("{")
    return {"run": run, "data": place.trained}


def _flipped(folder: Path) -> None:
    """Changes a byte of a checkpoint without changing its size."""
    path = max(folder.glob("checkpoints/step_*/*.distcp"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _flipped_run(place: Place) -> dict[str, Any]:
    run = place.continued
    _flipped(Path(run["dir"]))
    return {"run": run, "data": place.trained}


def _flipped_start(place: Place) -> dict[str, Any]:
    start = place.continued["dir"]
    _flipped(Path(start))
    return {"run": {"dir": str(place.own / "new")}, "checkpoint": {"initialize_from": start}}


CASES = {
    "a module that is not there": _loss(2, "module 'nowhere' is not", function="nowhere.losses:mine"),
    "a module without the function": _loss(2, "json has no 'mine'", function="json:mine"),
    "a name that is no function": _loss(2, "is not known", function="next_tokens"),
    "no function": _loss(2, "is of type str, but has to be a function", function="json:__name__"),
    "options that are not taken": _loss(2, "change loss.options", options={"smooth": 1}),
    "a side term that is not there": _loss(
        2, "is not on the import path", side_terms={"x": {"function": "nowhere.losses:mine"}}
    ),
    "no teacher": _loss(2, "loss.teacher is not given", function="distillation"),
    "a teacher that nobody asks": _loss(2, "loss.teacher", teacher={"checkpoint": "anywhere"}),
    "extras that records lack": _loss(2, "lacks advantages", function="ppo"),
    "logits in chunks": _loss(
        2, "mark it if", function="tests.core.loss.bad_losses:scaled", options={"factor": 1.0}, chunk_tokens=8
    ),
    "a head without records": Case(2, "which predicts no tokens", lambda place: {"model": {**SMALL, "num_labels": 2}}),
    "a preference without pairs": _loss(2, "compares answers", function="dpo"),
    "a short corpus": Case(3, "one sample needs 17", lambda place: {"data": place.indexed(place.corpus(16))}),
    "a short part": Case(
        3, "one sample needs", lambda place: {"data": place.indexed(place.corpus(40), split=[0.1, 0.9, 0.0])}
    ),
    "a short validation set": Case(
        3,
        "one sample needs 2",
        lambda place: {"data": place.indexed(place.corpus(40), valid=[{"path": place.corpus(1, "valid")}])},
    ),
    "a blend beyond the limit": Case(
        2,
        "is less than 1/100000 of the sum",
        lambda place: {
            "data": place.indexed()
            | {"train": [{"path": place.corpus(40)}, {"path": place.corpus(40, "b"), "weight": 1e-9}]}
        },
    ),
    "a later blend beyond the limit": Case(
        2,
        "is less than 1/100000 of the sum",
        lambda place: {
            "data": place.indexed(
                place.corpus(40),
                curriculum=[
                    {
                        "from_step": 1,
                        "sources": [
                            {"path": str(place.own / "corpus")},
                            {"path": place.corpus(40, "b"), "weight": 1e-9},
                        ],
                    }
                ],
            )
        },
    ),
    "a bad record far down": Case(3, "line 3", lambda place: {"data": place.sft(LINE, LINE, {"text": 7})}),
    "too many bad records": Case(
        3, "more than data.max_bad", lambda place: {"data": place.sft(LINE, {"text": 7}, LINE, on_bad="skip")}
    ),
    "samples that are all too long": Case(
        3,
        "nothing to train on",
        lambda place: {"data": place.sft(LINE | {"prompt": "a " * 40}, too_long="drop")},
    ),
    "a sample that is too long": Case(
        3, "tokens", lambda place: {"data": place.sft(LINE, LINE | {"prompt": "a " * 40}, too_long="refuse")}
    ),
    "nothing to learn": Case(3, "a token to train", lambda place: {"data": place.sft(LINE | {"weight": 0.0})}),
    "an extra that is not finite": Case(
        4,
        "must be finite",
        lambda place: {
            "data": place.sft(LINE | {"advantages": 1e39}, extras=["advantages"]),
            "loss": {"function": "cispo", "options": {"old_logprobs": False}},
        },
    ),
    "no tokenizer": Case(3, "nowhere", lambda place: {"data": place.sft(LINE, tokenizer="nowhere")}),
    "no prompts": Case(
        3,
        "which should hold prompts, does not exist",
        lambda place: {"data": place.sft(LINE), "eval": {"prompts_file": "nowhere.txt", "interval_steps": 1}},
    ),
    "a tensor less": _hf("lacks model.norm.weight", _without_norm),
    "a tensor more": _hf("has unexpected", _with_another),
    "another shape": _hf("has shape", _narrower),
    "codes for weights": _hf("plain floating-point", _integers),
    "a file that is cut off": Case(3, "model.safetensors", _cut_file),
    "another width": _start("has shape", hidden_size=32),
    "another depth": _start("has shape", num_layers=4),
    "another norm": _start("which the model has", qk_norm=True),
    "another vocabulary": _start("vocabulary of 64", vocab_size=60),
    "a place without weights": Case(
        3, "neither a checkpoint", lambda place: {"checkpoint": {"initialize_from": "nowhere"}}
    ),
    "another adapter": Case(3, "differs from the run's adapter", _adapter),
    "a teacher of another vocabulary": Case(
        2,
        "the teacher's vocabulary",
        lambda place: {
            "loss": {"function": "distillation", "teacher": {"checkpoint": place.base}},
            "model": {**SMALL, "vocab_size": 60},
        },
    ),
    "a model without a family": Case(
        2,
        "asks for Hugging Face folders",
        lambda place: {
            "checkpoint": {"interval_steps": 1, "export_hf_every_steps": 1},
            "model": {**SMALL, "activation": "gelu", "norm": "layernorm"},
        },
    ),
    "a run folder in use": Case(6, "is in use by", lambda place: {}, _in_use),
    "a run that goes on against its will": _continued(6, "checkpoint.resume=never", checkpoint={"resume": "never"}),
    "a run with another rate": _continued(6, "optimizer.lr", optimizer={"lr": 0.5}),
    "a run of another batch": _continued(6, "train.global_batch_size", train={**TRAIN, "global_batch_size": 4}),
    "a run on other data": Case(
        3, "are not those that", lambda place: {"run": place.continued, "data": place.indexed(place.corpus(41))}
    ),
    "a byte of the run's checkpoint": Case(3, "has changed since it was saved", _flipped_run),
    "a byte of the weights to start from": Case(3, "has changed since it was saved", _flipped_start),
    "a run whose checkpoint is damaged": Case(3, "no usable checkpoint", _damaged),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a run of one step, a Hugging Face folder and a tokenizer."""
    folder = tmp_path_factory.mktemp("shared")
    save("llama", folder / "hf", max_shard_size="1GB", vocab_size=64)
    _save_tokenizer(folder / "tokenizer")
    place = Place(folder, folder)
    place.corpus(40)
    assert _train(_file(place, {"run": {"dir": place.base}, "data": place.trained})).returncode == 0
    return folder


def _save_tokenizer(folder: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *"abcdefg"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def _file(place: Place, sections: dict[str, Any]) -> Path:
    sound = content() | {"model": {**SMALL, "num_layers": 2}, "train": TRAIN, "optimizer": {"lr": 1e-3}}
    sound |= {"run": {"dir": str(place.own / "run")}, "data": {"kind": "mock", "seq_length": 16}}
    found = sound | sections
    if "hf" not in found["model"]:
        found["model"] = {"num_layers": 2} | found["model"]
    return write(place.own / "config.yaml", found)


def _train(file: Path) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, "-m", "mtrain", "train", file])


SAME_PLACES = {
    "a module without the function": "a module that is not there",
    "a blend beyond the limit": "a later blend beyond the limit",
    "a tensor more": "a tensor less",
    "another depth": "another width",
}
"""Case that waits for the night -> case of the day that both verbs refuse in the same place."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in SAME_PLACES else []) for name in CASES]
)
def test_check_refuses_what_train_refuses(name: str, shared: Path, tmp_path: Path) -> None:
    case, place = CASES[name], Place(shared, tmp_path)
    file = _file(place, case.sections(place))
    with case.meanwhile(place):
        code, text = call("check", file, "--world-size", 1)
        done = _train(file)
    # lines on its kind and place follow the message
    (refused,) = re.findall(r"^error: ((?:.*\n)+?)(?=  class: |\Z)", done.stderr, re.MULTILINE) or [done.stderr]
    assert (done.returncode, case.words in refused) == (case.code, True), done.stderr
    assert (code, f"error: {refused}" in text) == (done.returncode, True), (refused, text)
    assert "Traceback" not in text + done.stderr


def test_a_sound_run_passes_both(shared: Path, tmp_path: Path) -> None:
    place = Place(shared, tmp_path)
    for number, sections in enumerate(
        (
            {},
            {"data": place.sft(LINE, LINE)},
            {"model": {"hf": str(place.hf)}},
            {"checkpoint": {"initialize_from": place.base}},
            {
                "run": place.continued,
                "data": place.trained,
                "train": {**TRAIN, "num_steps": 2},
                "optimizer": {"lr": 1e-3, "decay_steps": 1},
            },
        )
    ):
        file = _file(place, {"run": {"dir": str(tmp_path / str(number))}} | sections)
        code, text = call("check", file, "--world-size", 1)
        assert code == 0, text
        done = _train(file)
        assert done.returncode == 0, done.stderr


def _twice_as_deep(model: dict[str, Any]) -> dict[str, Any]:
    """Doubles the layers, and what is listed for each of them."""
    pattern, megatron = model["layer_pattern"], dict(model["megatron"])
    if "no_rope_freq" in megatron:
        megatron["no_rope_freq"] = 2 * megatron["no_rope_freq"]
    deeper = {"num_layers": 2 * model["num_layers"], "layer_pattern": pattern and 2 * pattern, "megatron": megatron}
    return model | deeper


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in FAMILIES]
)
def test_weights_of_every_family_fit_their_model(family: str, tmp_path: Path) -> None:
    """The names and shapes expected of a checkpoint are those that an import has."""
    save(family, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "imported", None, num_workers=1)
    place = Place(tmp_path, tmp_path)
    model = described_model(tmp_path / "hf").model_dump()
    # as if from another program: without our manifest
    shutil.copytree(tmp_path / "imported", tmp_path / "foreign")
    (tmp_path / "foreign" / "mtrain.json").unlink()
    for name in ("imported", "foreign"):
        start = {"model": model, "checkpoint": {"initialize_from": str(tmp_path / name)}}
        code, text = call("check", _file(place, start), "--world-size", 1)
        assert code == 0, text
        deeper = {**start, "model": _twice_as_deep(model)}
        code, text = call("check", _file(place, deeper), "--world-size", 1)
        assert (code, "use the model that it was saved from" in text) == (3, True), text
