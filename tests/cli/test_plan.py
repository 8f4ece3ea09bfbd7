"""`mtrain plan` and what `mtrain check` says of memory, as commands."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st

from mtrain.config.changes import flat_keys
from mtrain.config.load import config_yaml
from mtrain.hf.configuration import load_config
from tests.cli.command_line import call
from tests.cli.test_verbs import modules_loaded_by
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.hf.folders import save
from tests.paths import CONFIGS, DOCS, ROOT

LLAMA = CONFIGS / "model" / "llama3_8b.yaml"
ASKED = ("--seq-length", 4096, "--global-batch-size", 64)


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```console\n(.*?)```", (DOCS / "machines" / "planning.md").read_text(), re.DOTALL)
    command, _, shown = block.partition("\n")
    code, text = call(*shlex.split(command.removeprefix("$ mtrain ")))
    assert code == 0
    assert text.rstrip() == shown.rstrip()


def test_what_is_written_of_a_run_passes_check_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    run = (LLAMA, CONFIGS / "run" / "pretrain.yaml", "train.global_batch_size=64")
    code, text = call("plan", *run, "--gpus", 16, "--write", file)
    assert (code, f"written to {file}: mtrain check {file}" in text) == (0, True), text
    code, text = call("check", file, "--without-files")
    assert (code, "on 16 ranks" in text) == (0, True), text
    assert re.search(r"fits: the heaviest rank needs [\d.]+ of 72.0 GiB \(90% of 80.0\)", text)
    code, text = call("plan", *run, "--gpus", 16, "--write", file)
    assert (code, text.endswith("already exists; name another file, or move it away\n")) == (2, True)


def test_what_a_run_needs_and_nobody_gave_is_left_out_by_name(tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    code, text = call("plan", LLAMA, "--gpus", 16, *ASKED, "--write", file)
    lacking = "run.dir, train.num_steps, optimizer.lr, data.kind"
    assert (code, f"written to {file} without {lacking}; add the run's values" in text) == (0, True), text
    assert f"# a run also needs {lacking}\n" in file.read_text()
    written = yaml.safe_load(file.read_text())
    assert written.keys() <= {"model", "layout", "train", "data"}
    assert written["data"] == {"seq_length": 4096}
    assert written["train"].keys() <= {"global_batch_size", "micro_batch_size", "recompute", "recompute_modules"}
    code, text = call("check", file, "--without-files")
    assert (code, "optimizer: " in text, "run: " in text, "train.num_steps: " in text) == (2, True, True, True), text
    rest = {"run": {"dir": str(tmp_path)}, "train": {"num_steps": 3}, "optimizer": {"lr": 1e-3}}
    given = write(tmp_path / "rest.yaml", {**rest, "data": {"kind": "mock"}})
    code, text = call("check", file, given, "--without-files")
    assert (code, "on 16 ranks" in text) == (0, True), text


SIZED = sorted((CONFIGS / "model").glob("*.yaml"))
BY_DAY = ("gemma4_31b", "phi4_14b", "qwen3.5_9b")


@pytest.mark.parametrize(
    "file",
    [pytest.param(each, id=each.stem, marks=[] if each.stem in BY_DAY else pytest.mark.nightly) for each in SIZED],
)
def test_every_model_has_a_plan_that_passes_check(file: Path, tmp_path: Path) -> None:
    """Each published size fits 512 GPUs somehow, and check says the same of the layout that plan chose."""
    run, planned = CONFIGS / "run" / "pretrain.yaml", tmp_path / "planned.yaml"
    code, text = call("plan", file, run, "train.global_batch_size=512", "--gpus", 512, "--top", 1, "--write", planned)
    assert (code, "1  tp" in text) == (0, True), text
    code, text = call("check", planned, "--without-files")
    assert (code, "on 512 ranks" in text) == (0, True), text
    assert re.search(r"fits: the heaviest rank needs [\d.]+ of 72.0 GiB", text)


CHOSEN = re.compile(r"layout\.\w+|train\.(micro_batch_size|recompute\w*)")
"""Keys that a plan may choose: everything else is the user's."""
OVERLAP_KEYS = {"train.overlap_grad_reduce", "train.overlap_param_gather"}
LACKING = {"run.dir": "runs/x", "train.num_steps": 7000, "optimizer.lr": 0.5, "data.kind": "mock"}
OVERRIDES: dict[str, list[Any]] = {
    "train.overlap_grad_reduce": [True, False],
    "train.distributed_optimizer": [True, False],
    "train.offload_layers": [1, 2],
    "train.offload_optimizer": [True],
    "train.micro_batch_size": [1, 4],
    "train.recompute": ["none", "full"],
    "train.precision": ["bf16", "fp32"],
    "train.seed": [3],
    "train.num_steps": [300, 9000],
    "optimizer.lr": [1e-5, 2.0],
    "optimizer.min_lr": [1e-6, 0.0],
    "optimizer.warmup_steps": [0, 7, 250],
    "optimizer.schedule": ["wsd", "constant", "linear"],
    "optimizer.kind": ["muon"],
    "layout.tp": [2],
    "layout.cp": [2],
    "checkpoint.keep_last": [5],
    "metrics.tensorboard": [False],
    "loss.aggregation": ["sequence-mean"],
}
MODELS = ("llama3_8b", "qwen3_30b_a3b", "gpt_oss_20b", "gemma3_4b")


@st.composite
def configurations(draw: st.DrawFn) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Draws files and overrides of a run, or of a model alone."""
    model = CONFIGS / "model" / f"{draw(st.sampled_from(MODELS))}.yaml"
    others = [*(CONFIGS / "run").glob("[!q]*.yaml"), *(CONFIGS / "start").glob("*.yaml"), None]
    run = draw(st.sampled_from(sorted(others, key=str)))
    names = draw(st.lists(st.sampled_from(sorted(OVERRIDES)), unique=True, max_size=5))
    keys = {name: draw(st.sampled_from(OVERRIDES[name])) for name in names}
    keys |= {"train.global_batch_size": 64} if run is None else {}
    keys |= {"data.seq_length": 4096} if run is None or "start" in run.parts else {}
    return (model,) if run is None else (model, run), tuple(f"{key}={json.dumps(value)}" for key, value in keys.items())


def resolved(files: Sequence[Path], overrides: Sequence[str], lacking: Collection[str]) -> dict[str, Any]:
    """Returns every key of the configuration, with defaults filled in."""
    filled = [f"{key}={json.dumps(LACKING[key])}" for key in lacking]
    return flat_keys(config_yaml(load_config(list(files), [*overrides, *filled])))


@pytest.mark.parametrize("num_examples", [2, pytest.param(40, marks=pytest.mark.nightly)])
def test_a_plan_changes_nothing_but_what_it_chooses(num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(given=configurations())
    def changes_nothing_else(given: tuple[tuple[Path, ...], tuple[str, ...]]) -> None:
        files, overrides = given
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "planned.yaml"
            code, text = call("plan", *files, *overrides, "--gpus", 32, "--gpu-memory", "180GiB", "--write", file)
            if code:  # `check` refuses it, too, or it fits nowhere
                assume("nothing fits" not in text)
                assert call("check", *files, *overrides, "--world-size", 32, "--without-files")[0] == code == 2, text
                reject()
            said = re.search(r" without ([\w., ]+); add", text)
            lacking = said[1].split(", ") if said else []
            before, after = resolved(files, overrides, lacking), resolved([file], (), lacking)
            event(f"{len(lacking)} keys left out")
        differing = {key for key in before.keys() | after.keys() if before.get(key, ...) != after.get(key, ...)}
        # sharded weights overlap in any case, and refuse the keys
        implied = OVERLAP_KEYS if after["layout.shard"] == "weights" else set()
        assert {key for key in differing - implied if not CHOSEN.fullmatch(key)} == set()

    changes_nothing_else()


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


@pytest.mark.nightly  # tests/plan/search/test_cost.py has bounds of each network
def test_a_faster_network_is_believed() -> None:
    def seconds(*options: object) -> float:
        code, text = call("plan", LLAMA, "--gpus", 64, *ASKED, "--json", "--top", 1, *options)
        assert code == 0
        return float(json.loads(text)["choices"][0]["step_seconds"]["total"])

    usual = seconds()
    assert seconds("--network-gbs", 5) > usual > seconds("--network-gbs", 500)
    assert seconds("--tflops", 500) > usual
    assert seconds("--nvlink-gbs", 45) >= usual


def _filled(folder: Path) -> list[str]:
    rest = {**LACKING, "model.hf": str(folder), "data.seq_length": 64, "train.global_batch_size": 8}
    return [f"{key}={json.dumps(value)}" for key, value in rest.items()]


def test_folders_of_hugging_face_are_models(tmp_path: Path) -> None:
    save("llama", tmp_path)
    few = ("--gpus", 2, "--seq-length", 64, "--global-batch-size", 8, "--json")
    of_folder = call("plan", tmp_path, *few)
    of_file = call("plan", tmp_path / "config.json", *few, "--write", tmp_path / "new.yaml")
    assert of_folder == of_file
    new = yaml.safe_load((tmp_path / "new.yaml").read_text())["model"]
    assert ("hf" in new, new["hidden_size"]) == (False, load_config([], _filled(tmp_path)).model.hidden_size)
    call("plan", tmp_path, *few, "--write", tmp_path / "from_weights.yaml")
    assert yaml.safe_load((tmp_path / "from_weights.yaml").read_text())["model"] == {"hf": str(tmp_path)}


def test_runs_are_planned_with_their_adapters_and_packing() -> None:
    run = CONFIGS / "run" / "lora.yaml"
    code, text = call("plan", CONFIGS / "model" / "qwen2.5_7b.yaml", run, "--gpus", 8, "--json", "--top", 1)
    assert code == 0
    (choice,) = json.loads(text)["choices"]
    frozen = choice["memory_bytes"]
    assert choice["layout"]["shard"] == "weights"  # so a rank has an eighth of the frozen weights
    assert frozen["gradients_bytes"] < frozen["weights_bytes"] / 10
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
    "plan {llama} --gpus 8 --gpu-memory 80": "--gpu-memory 80 is not a size; write it as 80GiB or 141GB",
    "plan {llama} --gpus 8 --seq-length 64 --global-batch-size 8 --gpu v100": "--gpu v100 is not known",
    "plan {llama} --gpus 8 --global-batch-size 8": "data.seq_length",
    "plan {llama} --gpus 37 --seq-length 64 --global-batch-size 8": "use --global-batch-size 37, or --gpus 8",
    "check {llama} {run} --without-files": "the number of ranks is not given",
    "check {llama} {run} --world-size 1 --gpu-memory nothing --without-files": "--gpu-memory nothing is not a size",
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
