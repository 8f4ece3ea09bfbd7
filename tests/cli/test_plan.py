"""`mtrain plan` and what `mtrain check` says of memory, as commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mtrain.config.load import load_config
from tests.cli.command_line import call
from tests.cli.test_verbs import modules_loaded_by
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.hf.folders import save
from tests.paths import CONFIGS, DOCS, ROOT

LLAMA = CONFIGS / "model" / "llama3_8b.yaml"
ASKED = ("--seq-length", 4096, "--global-batch-size", 64)


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```console\n(.*?)```", (DOCS / "planning.md").read_text(), re.DOTALL)
    command, _, shown = block.partition("\n")
    code, text = call(*shlex.split(command.removeprefix("$ mtrain ")))
    assert code == 0
    assert text.rstrip() == shown.rstrip()


def test_what_is_written_passes_check_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    code, text = call("plan", LLAMA, "--gpus", 16, *ASKED, "--write", file, f"run.dir={tmp_path / 'run'}")
    assert (code, f"written to {file}" in text) == (0, True), text
    code, text = call("check", file, "--without-files")
    assert (code, "on 16 ranks" in text) == (0, True), text
    assert re.search(r"fits: the heaviest rank needs [\d.]+ of 72.0 GiB \(90% of 80.0\)", text)
    written, first = load_config([file]), load_config([LLAMA, write(tmp_path / "rest.yaml", _rest(tmp_path))])
    assert written.model == first.model
    assert written.train.global_batch_size == 64
    code, text = call("plan", LLAMA, "--gpus", 16, *ASKED, "--write", file)
    assert (code, text.endswith("nothing is overwritten; name another file, or move it away\n")) == (2, True)


def _rest(folder: Path) -> dict[str, object]:
    return {name: value for name, value in content(run__dir=str(folder)).items() if name != "model"}


def test_programs_get_seconds_and_bytes() -> None:
    code, text = call("plan", LLAMA, "--gpus", 8, *ASKED, "--json", "--top", 2, "--gpu", "a100")
    assert code == 0
    found = json.loads(text)
    assert found["gpu"]["name"] == "a100"
    one, two = found["choices"]
    assert one["step_seconds"]["total"] <= two["step_seconds"]["total"]
    assert one["step_seconds"]["total"] == pytest.approx(sum(one["step_seconds"].values()) / 2)
    assert one["tokens_per_second"] == pytest.approx(64 * 4096 / one["step_seconds"]["total"])
    assert {"weights_bytes", "activations_bytes", "total_bytes"} <= one["memory_bytes"].keys()


def test_a_faster_network_is_believed() -> None:
    def seconds(*options: object) -> float:
        code, text = call("plan", LLAMA, "--gpus", 64, *ASKED, "--json", "--top", 1, *options)
        assert code == 0
        return float(json.loads(text)["choices"][0]["step_seconds"]["total"])

    usual = seconds()
    assert seconds("--network-gbs", 5) > usual > seconds("--network-gbs", 500)
    assert seconds("--tflops", 500) > usual
    assert seconds("--nvlink-gbs", 45) >= usual


def test_folders_of_hugging_face_are_models(tmp_path: Path) -> None:
    save("llama", tmp_path)
    few = ("--gpus", 2, "--seq-length", 64, "--global-batch-size", 8, "--json")
    of_folder = call("plan", tmp_path, *few)
    of_file = call("plan", tmp_path / "config.json", *few, "--write", tmp_path / "new.yaml")
    assert of_folder == of_file
    assert load_config([tmp_path / "new.yaml"]).model.hf is None
    call("plan", tmp_path, *few, "--write", tmp_path / "from_weights.yaml")
    assert load_config([tmp_path / "from_weights.yaml"]).model.hf == str(tmp_path)


def test_runs_are_planned_with_their_adapters_and_packing() -> None:
    run = CONFIGS / "run" / "lora.yaml"
    code, text = call("plan", CONFIGS / "model" / "qwen2.5_7b.yaml", run, "--gpus", 8, "--json", "--top", 1)
    assert code == 0
    frozen = json.loads(text)["choices"][0]["memory_bytes"]
    assert frozen["gradients_bytes"] < frozen["weights_bytes"] / 20
    code, text = call("plan", LLAMA, CONFIGS / "run" / "finetune_128k.yaml", "--gpus", 32, "--json", "--top", 1)
    assert code == 0
    assert json.loads(text)["choices"][0]["layout"]["cp"] > 1


def test_planning_loads_neither_torch_nor_numpy() -> None:
    code, *loaded = modules_loaded_by("plan", str(LLAMA), "--gpus", "8", *map(str, ASKED)).split()
    assert code == "0"
    assert {"torch", "megatron", "numpy", "transformers"}.isdisjoint(loaded)


@pytest.mark.fault(
    "input",
    "a run that does not fit into the memory of a GPU, under `mtrain check --gpu-memory`",
    happens="what it needs, what there is, and the smallest change with which it fits",
    exit_code=2,
)
def test_check_says_what_to_change(notice: Notice) -> None:
    given = (LLAMA, CONFIGS / "run" / "pretrain.yaml", "--world-size", 8, "--without-files", "--gpu-memory")
    with notice:
        code, text = call("check", *given, "80GiB", "train.micro_batch_size=4")
    assert code == notice.exit_code
    message = text.splitlines()[-1]
    (change,) = re.findall(r"set (.*), which needs [\d.]+ GiB \([+-]\d+% predicted time of a step\)", message)
    assert call("check", *given, "80GiB", "train.micro_batch_size=4", *change.split())[0] == 0


WRONG = {
    "plan {llama} --gpus 8 --gpu-memory 80": "--gpu-memory 80 is no size; write it as 80GiB or 141GB",
    "plan {llama} --gpus 8 --seq-length 64 --global-batch-size 8 --gpu v100": "--gpu v100 is not known",
    "plan {llama} --gpus 8 --global-batch-size 8": "data.seq_length",
    "plan {llama} --gpus 37 --seq-length 64 --global-batch-size 8": "take --global-batch-size 37, or --gpus 8",
    "check {llama} {run} --without-files": "how many ranks the run has is not given",
    "check {llama} {run} --world-size 1 --gpu-memory nothing --without-files": "--gpu-memory nothing is no size",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_one_message(line: str) -> None:
    named = line.format(llama=LLAMA, run=CONFIGS / "run" / "pretrain.yaml")
    code, text = call(*named.split())
    assert (code, WRONG[line] in text.splitlines()[-1]) == (2, True), text
    assert "Traceback" not in text


@pytest.mark.parametrize("start", sorted((CONFIGS / "start").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_people_start_from_fits_the_gpus_that_it_names(start: Path) -> None:
    (model,) = (path for path in (CONFIGS / "model").glob("*.yaml") if start.stem.startswith(f"{path.stem}_"))
    code, text = call("check", model, start, "--without-files")
    assert (code, "fits: the heaviest rank needs" in text) == (0, True), text.splitlines()[-1]
