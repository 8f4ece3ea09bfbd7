"""`mtrain check` inspects what a run will open and write; each fault has its message and exit code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mtrain.base import certificate
from mtrain.base.certificate import Certificate
from mtrain.data.formats.megatron_indexed import Corpus, check_pair, writing_corpus
from tests.cli.command_line import call
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.data.chat.cases import folder_of, write_tokenizer
from tests.fault_table import Notice
from tests.hf.folders import content_of, save

Check = Callable[..., tuple[int, str]]
CHAT = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with a tokenizer and a chat template."""
    bare = tmp_path_factory.mktemp("bare")
    write_tokenizer(bare)
    return folder_of("qwen3", bare / "tokenizer.json", tmp_path_factory.mktemp("chat"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Returns the prefix of a pair with five documents."""
    with writing_corpus(str(tmp_path / "corpus"), vocab_size=1000) as writer:
        for document in range(5):
            writer.add(np.arange(document, document + 40 + document))
    return tmp_path / "corpus"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Returns a function that checks a small run with some changes and gives exit code and output."""

    def run(*options: str, **changes: Any) -> tuple[int, str]:
        given = content(**{"run__dir": str(tmp_path / "run"), **changes})
        return call("check", write(tmp_path / "config.yaml", given), "--world-size", 2, *options)

    return run


@pytest.mark.parametrize("name", ["qwen3", "kimi-k2.5", "glm4-moe"])
def test_a_config_json_alone_is_enough_before_anything_starts(name: str, tmp_path: Path) -> None:
    """Weights say whether there is a head beside images, and layers that predict further ahead; a plan goes without."""
    alone = tmp_path / "alone"
    alone.mkdir()
    said = content_of(name) | ({"num_nextn_predict_layers": 1} if name == "glm4-moe" else {})
    (alone / "config.json").write_text(json.dumps(said))
    given = content(run__dir=str(tmp_path / "run")) | {"model": {"hf": str(alone)}}
    file = write(tmp_path / "config.yaml", given)
    sizes = ("--seq-length", 8, "--global-batch-size", 8)
    for verb in (["plan", file, "--gpus", 2], ["plan", alone / "config.json", "--gpus", 2, *sizes]):
        code, output = call(*verb)
        assert code == 0, output
    code, output = call("check", file, "--world-size", 1, "--without-files")
    assert code == 0, output
    code, output = call("launch", "slurm", file, "--nodes", 1, "--dry-run")
    assert code == 0, output
    assert "has no weights, which a start would refuse" in output
    code, output = call("check", file, "--world-size", 1)
    assert code == 3, output
    assert "has neither model.safetensors nor" in output


def indexed(prefix: Path) -> dict[str, Any]:
    return {"kind": "indexed", "seq_length": 64, "train": [{"path": str(prefix)}]}


def sft(tokenizer: Path, *paths: Path, **keys: Any) -> dict[str, Any]:
    sources = [{"path": str(path)} for path in paths]
    return {"kind": "sft", "seq_length": 64, "train": sources, "tokenizer": str(tokenizer), **keys}


def records(path: Path, *found: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in found))
    return path


def test_what_is_there_is_said(check: Check, corpus: Path, tokenizer: Path) -> None:
    code, text = check(data={**indexed(corpus), "tokenizer": str(tokenizer)}, layout={"tp": 2})
    assert code == 0, text
    assert f"{corpus}: 5 documents, 210 tokens" in text
    assert "tokens of model.vocab_size=1,000 (1,024 rows with padding for tp 2)" in text
    assert "checkpoints; " in text


def test_sizes_epochs_and_hours_are_said(check: Check, tokenizer: Path, tmp_path: Path) -> None:
    path = records(tmp_path / "chat.jsonl", *[CHAT] * 20, {**CHAT, "messages": [*CHAT["messages"]] * 40})
    data = sft(tokenizer, path, too_long="drop")
    train = {"global_batch_size": 8, "micro_batch_size": 1, "num_epochs": 2.5, "precision": "fp32"}
    code, text = check("--gpu", "h100", data=data, train=train, optimizer={"lr": 1e-3, "warmup_ratio": 0.25})
    assert code == 0, text
    assert re.search(rf"data +{path}: 21 records, [\d,]+ tokens, the longest sequence has \d+; 4\.8% are longer", text)
    assert "20 samples in 3 steps; the run's 7 pass them 2.80 times" in text, "of 2.5 x 20 samples, in steps of 8"
    assert re.search(r"time of the run +[\d.]+ hours on 2 x h100, predicted .*: 7 steps of", text)
    code, text = check("--without-files", data=data, train=train)
    assert code == 0, text
    assert "those of 2.5 epochs" in text


@pytest.mark.parametrize("batch", ["sequences", "rows"])
def test_hours_are_those_of_the_rows_that_samples_share(
    batch: str, check: Check, tokenizer: Path, tmp_path: Path
) -> None:
    """Rows, counted by hand, take the time of as many samples without packing."""
    path, num_samples = records(tmp_path / "chat.jsonl", *[CHAT] * 64), 64

    def seconds(size: int, packing: dict[str, Any] | None) -> tuple[float, str]:
        data = sft(tokenizer, path, packing=packing)
        code, text = check("--gpu=h100", data=data, train__global_batch_size=size, train__micro_batch_size=1)
        assert code == 0, text
        found = re.search(r"steps of ([\d.e-]+) s$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1]), text

    alone, text = seconds(num_samples, None)
    longest = re.search(r"the longest sequence has (\d+)", text)
    assert longest is not None
    rows = -(-num_samples // (64 // (int(longest[1]) - 1)))
    together, _ = seconds(num_samples if batch == "sequences" else rows + rows % 2, {"batch": batch})
    equal, _ = seconds(rows + rows % 2, None)
    assert together == pytest.approx(equal, rel=0.02)
    assert together < alone / 2


def test_how_often_a_blend_passes_each_source_is_said(check: Check, tokenizer: Path, tmp_path: Path) -> None:
    few, many = records(tmp_path / "few.jsonl", *[CHAT] * 4), records(tmp_path / "many.jsonl", *[CHAT] * 12)
    data = sft(tokenizer, few, many)
    data["train"][1]["weight"] = 2.0
    code, text = check(data=data, train__num_steps=9, train__global_batch_size=4)
    assert code == 0, text
    assert f"{few}: 4 samples, passed 3.00 times by the run" in text
    assert f"{many}: 12 samples, passed 2.00 times by the run" in text
    code, text = check(data=data, train={"global_batch_size": 4, "num_epochs": 1})
    assert code == 2
    assert "train.num_epochs=1 counts passes through one source" in text


def test_a_tracker_that_is_not_installed_is_named(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = check(metrics__trackers=["wandb", "mlflow"])
    assert code == 0, text
    assert "trackers          wandb, mlflow" in text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, text = check(metrics__trackers=["wandb", "trackio"])
    assert code == 2
    assert "has wandb, trackio, which are not installed; pip install 'mtrain[wandb,trackio]', or leave it out" in text


def test_a_quick_look_finds_what_opening_finds(corpus: Path) -> None:
    opened = Corpus(str(corpus), 1000)
    assert check_pair(str(corpus), 1000) == (len(opened.document_lengths), int(opened.document_lengths.sum()))


def _missing(corpus: Path) -> None:
    corpus.with_suffix(".idx").unlink()


def _shortened(corpus: Path) -> None:
    path = corpus.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])


def _of_another_pair(corpus: Path) -> None:
    data = bytearray(corpus.with_suffix(".idx").read_bytes())
    data[34] += 1  # the first length, so that offsets do not follow from lengths
    corpus.with_suffix(".idx").write_bytes(data)


def _unreadable(corpus: Path) -> None:
    corpus.with_suffix(".bin").unlink()
    corpus.with_suffix(".bin").mkdir()


def _beyond_the_vocabulary(corpus: Path) -> None:
    path = corpus.with_suffix(".bin")
    tokens = np.fromfile(path, np.uint16)
    tokens[100] = 1000
    tokens.tofile(path)


DAMAGES: dict[Callable[[Path], None], str] = {
    _missing: "corpus.idx does not exist (corpus.bin exists)",
    _shortened: "the two files do not belong together or one is truncated",
    _of_another_pair: "its byte offsets do not follow from its lengths",
    _unreadable: "corpus.bin does not exist",
    _beyond_the_vocabulary: "comes token 1000, but model.vocab_size is 1000",
}


@pytest.mark.fault(
    "input",
    "a corpus that is missing, cut, mixed up or beyond the vocabulary, under `mtrain check`",
    happens="named before anything starts, without torch",
    exit_code=3,
)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_corpus_that_could_not_be_read_is_named(
    damage: Callable[[Path], None], check: Check, corpus: Path, notice: Notice
) -> None:
    damage(corpus)
    with notice:
        code, text = check(data=indexed(corpus))
    assert code == notice.exit_code
    assert DAMAGES[damage] in text.splitlines()[-1]
    assert check("--without-files", data=indexed(corpus))[0] == 0


def test_blends_of_later_steps_are_looked_at_too(check: Check, corpus: Path, tmp_path: Path) -> None:
    later = [{"from_step": 3, "sources": [{"path": str(tmp_path / "later")}]}]
    code, text = check(data={**indexed(corpus), "curriculum": later})
    assert code == 3
    assert f"{tmp_path / 'later'}.idx does not exist" in text


def test_every_fault_is_named_at_once(check: Check, tmp_path: Path) -> None:
    code, text = check(data={**indexed(tmp_path / "a"), "tokenizer": "nowhere", "valid": [{"path": "b"}]})
    assert code == 3
    faults = [line for line in text.splitlines() if line.startswith("error: ")]
    assert [word in fault for word, fault in zip(("nowhere", "a.idx", "b.idx"), faults, strict=True)] == [True] * 3


@pytest.mark.fault(
    "input",
    "a tokenizer with more tokens than the model, under `mtrain check`",
    happens="both numbers are named",
    exit_code=3,
)
def test_a_vocabulary_that_is_too_small_is_refused(
    check: Check, tokenizer: Path, notice: Notice, tmp_path: Path
) -> None:
    """The refusal needs a token beyond it in the data: some tokenizers are larger than their model, like Gemma 3's."""
    path = tmp_path / "records.jsonl"
    records(path, CHAT)
    with notice:
        code, text = check(data=sft(tokenizer, path), model__vocab_size=100)
    assert code == notice.exit_code
    assert re.search(r"contains token \d+, but model.vocab_size is 100; use the model's own", text)
    assert check(data={"kind": "mock", "seq_length": 64, "tokenizer": str(tokenizer)}, model__vocab_size=100)[0] == 0


def test_the_first_record_of_each_file_is_made_into_a_sample(check: Check, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    for name in "ab":
        records(folder / f"{name}.jsonl", CHAT)
    code, text = check(data=sft(tokenizer, folder))
    assert code == 0, text
    assert "records: 2 file(s), the first record of each is a sample" in text


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no template": ({"chat_template": "nowhere.jinja"}, "nowhere.jinja cannot be read"),
    "of no such name": ({"chat_template": "rag"}, "has no chat template named 'rag', but default"),
    "does not compile": ({"chat_template": "broken.jinja"}, "broken.jinja"),
    "refuses": ({"chat_template": "refusing.jinja"}, "only poems"),
}


@pytest.mark.fault(
    "input",
    "a chat template that is missing, does not compile or refuses the data, under `mtrain check`",
    happens="named with the file and line of the record that it was tried on",
    exit_code=3,
)
@pytest.mark.parametrize("name", BAD)
def test_a_template_is_tried_on_the_data(
    name: str, check: Check, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('only poems') }}")
    keys, words = BAD[name]
    with notice:
        code, text = check(data=sft(tokenizer, records(tmp_path / "a.jsonl", CHAT), **keys))
    assert code == notice.exit_code, text
    assert words in text.splitlines()[-1]
    assert "Traceback" not in text


def test_conversations_need_a_template(check: Check, tokenizer: Path, tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", CHAT)
    bare = tmp_path / "without"
    shutil.copytree(tokenizer, bare)
    (bare / "chat_template.jinja").unlink()
    code, text = check(data=sft(bare, path))
    assert code == 3
    assert f"{path} line 1: has messages, but" in text
    assert check(data=sft(bare, path, chat_template="plain"))[0] == 0


def test_a_bad_first_record_is_refused_or_noted_as_the_run_would(check: Check, tokenizer: Path, tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", {"text": 7}, CHAT)
    code, text = check(data=sft(tokenizer, path))
    assert (code, f"{path} line 1: " in text) == (3, True)
    code, text = check(data=sft(tokenizer, path, on_bad="skip"))
    assert (code, "more than data.max_bad=0.01 allows" in text) == (3, True), "half of the records"
    code, text = check(data=sft(tokenizer, path, on_bad="skip", max_bad=1))
    assert (code, "the first record is bad and will be left out" in text) == (0, True)


def test_a_file_of_no_records_is_named(check: Check, tokenizer: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), empty)
    code, text = check(data=sft(tokenizer, empty))
    assert (code, f"{empty} has no records" in text) == (3, True), text


@pytest.mark.fault(
    "folders",
    "model.hf without its weights, or with a file cut off, under `mtrain check`",
    happens="the file is named",
    exit_code=3,
)
def test_weights_are_looked_for(check: Check, tmp_path: Path, notice: Notice) -> None:
    folder = tmp_path / "hf"
    save("llama", folder)
    code, text = check(model={"hf": str(folder)})
    assert (code, f"{folder}: " in text) == (0, True), text
    *_, last = sorted(folder.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-10])
    with notice:
        code, text = check(model={"hf": str(folder)})
    assert code == notice.exit_code
    assert f"{last} is damaged: its tensors end at byte" in text
    last.unlink()
    assert f"{last} cannot be read" in check(model={"hf": str(folder)})[1]
    code, text = check(checkpoint={"initialize_from": "nowhere"})
    assert (code, "nowhere is neither a checkpoint" in text) == (3, True)


@pytest.mark.fault(
    "disk",
    "a disk without room for the checkpoints and exports to come, under `mtrain check`",
    happens="needed and free space are named, and the keys that need less",
    exit_code=7,
)
def test_checkpoints_that_do_not_fit_are_refused(check: Check, notice: Notice) -> None:
    large = {"model__hidden_size": 8192, "model__num_layers": 80, "model__ffn_hidden_size": 28672}
    with notice:
        code, text = check(checkpoint={"interval_steps": 1, "keep_last": 5, "export_hf_every_steps": 5}, **large)
    assert code == notice.exit_code
    assert "needs room for 6 x " in text
    assert "GiB of checkpoints and 2 x " in text
    assert "lower checkpoint.keep_last=5" in text


def test_a_run_folder_that_cannot_be_made_is_refused(check: Check, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = check(run__dir=str(tmp_path / "file" / "run"))
    assert code == 7
    assert "which is a file" in text


def test_prompts_of_eval_are_read_as_the_run_will_read_them(check: Check, tmp_path: Path, tokenizer: Path) -> None:
    data = {"kind": "mock", "seq_length": 64, "tokenizer": str(tokenizer)}
    asked = {"prompts": ["one"], "prompts_file": str(tmp_path / "more.jsonl"), "interval_steps": 1}
    code, output = check(data=data, eval=asked)
    assert code == 3
    assert "more.jsonl, which should hold prompts, does not exist" in output
    records(tmp_path / "more.jsonl", {"prompt": "two words"})
    code, output = check(data=data, eval=asked)
    assert code == 0, output
    assert "2 of eval" in output
    records(tmp_path / "more.jsonl", {"messages": CHAT["messages"][:1]})  # a mock run has no chat template
    code, output = check(data=data, eval=asked)
    assert code == 2
    assert "the run has no chat template" in output


def test_data_in_which_nothing_is_learned_are_refused_as_a_run_refuses_them(
    check: Check, tokenizer: Path, tmp_path: Path
) -> None:
    nothing = records(tmp_path / "nothing.jsonl", *[{"prompt": "a", "response": "b", "weight": 0}] * 3)
    code, output = check(data=sft(tokenizer, nothing, cache_dir=str(tmp_path / "cache")))
    assert code == 3, output
    assert "no training sample has a token to train" in output
    assert "nothing.jsonl: of 3 sequences 3 have weight 0" in output
    something = records(tmp_path / "something.jsonl", {"prompt": "a", "response": "b"})
    code, output = check(data=sft(tokenizer, nothing, something, cache_dir=str(tmp_path / "cache")))
    assert code == 0, output


def test_a_machine_with_a_gpu_and_no_certificate_says_how_to_make_one(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, driver = "mtrain verify backend", tmp_path / "version"
    monkeypatch.setenv(certificate.VARIABLE, str(tmp_path / "certificates"))
    monkeypatch.setattr(certificate, "NVIDIA_DRIVER", driver)
    assert said not in check()[1], "no GPU"
    driver.write_text("NVRM version")
    code, text = check()
    assert code == 0, text
    assert re.search(rf"`{said} \S+/config.yaml` takes", text)
    assert said not in check("--without-files")[1], "another machine"
    assert said not in check(model__backend="torch", train__compile="none")[1], "nothing would follow it"
    assert said in check(model__backend="torch")[1], "regions would"
    Certificate("now", {}, {}, {}).save(tmp_path / "certificates")
    assert said not in check()[1]
