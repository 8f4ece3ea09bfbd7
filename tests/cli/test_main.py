"""The command line: what it prints, its exit codes, and that bad input costs no import of torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.cli.arguments import EXAMPLES, loaded_config, split_arguments
from mtrain.cli.main import VERBS
from tests.cli.command_line import blocking, call
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.paths import ROOT

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "FORCE_COLOR")


def mtrain(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the program where importing torch is an error."""
    return mtrain_without(("torch",), *arguments, **environment)


def mtrain_without(
    packages: tuple[str, ...], *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program where importing these packages is an error."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    blocked = blocking(packages) + "import runpy; runpy.run_module('mtrain', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", blocked, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=clean | environment,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write(tmp_path / "config.yaml", content(run__dir=str(tmp_path / "run")))


SLOW_TO_IMPORT = (
    "torch",
    "numpy",
    "rich",
    "pydantic",
    "yaml",
    "jinja2",
    "concurrent",
    "importlib.metadata",
    "mtrain.config",
)
"""Packages that `mtrain --help` does not import."""


def test_help_names_the_verbs_and_imports_none() -> None:
    done = mtrain_without((*SLOW_TO_IMPORT, "mtrain.cli.check", "mtrain.cli.ranks"), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    verbs = [name for group in VERBS.values() for name in group]
    assert [line for line in lines if line in verbs] == verbs
    assert "Weights:" in lines


def test_each_verb_is_where_the_list_says() -> None:
    for name in (name for group in VERBS.values() for name in group):
        code, text = call(name, "--help")
        assert (code, f"Usage: root {name}" in text) == (0, True), text


def test_every_help_has_an_example() -> None:
    """The verbs of verbs too; tests/docs/test_reference.py hands each example to the verb's parser."""
    assert call("--help")[1].splitlines()[-1].strip() == "mtrain VERB --help shows an example."
    verbs = [name.split() for name in EXAMPLES]
    for words in [*verbs, *({tuple(each[:1]) for each in verbs if len(each) > 1})]:
        code, text = call(*words, "--help")
        *_, title, empty, example = map(str.strip, text.splitlines())
        assert (code, title, empty) == (0, "Example:", ""), text
        assert example in EXAMPLES.values()
        assert example.split()[1:].index(words[-1]) == len(words) - 1, example


@pytest.mark.parametrize("group", sorted({name.split()[0] for name in EXAMPLES if " " in name}))
def test_verbs_are_listed_by_whole_sentences(group: str) -> None:
    code, text = call(group, "--help")
    listed = text.partition("Commands:\n")[2].partition("Example:")[0].strip()
    sentences = " ".join(listed.split()).split(". ")
    assert code == 0
    assert "..." not in listed
    assert len(sentences) == sum(name.split()[0] == group for name in EXAMPLES if " " in name), sentences


@pytest.mark.parametrize("verb", ["convert import", "convert export"])
def test_brackets_of_a_usage_are_closed(verb: str) -> None:
    text = call(*verb.split(), "--help")[1]
    usage = text.partition("\n\n")[0]
    assert usage.count("[") == usage.count("]")
    assert not re.search(r"^  (\[\S+ <|\S+\] <)", text, re.MULTILINE), text


NEEDS_A_MODEL = "models/"
"""Beginning of a path in examples that only its reader has."""


@pytest.mark.parametrize(
    "words",
    [line.split()[1:] for line in EXAMPLES.values() if "configs/" in line and NEEDS_A_MODEL not in line],
    ids=lambda words: "-".join(words[:2]).partition("-configs")[0],
)
def test_the_configuration_of_an_example_is_whole(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if words[0] in ("plan", "check"):  # both need nothing else
        assert call(*words)[0] == 0, call(*words)
    else:
        loaded_config([each for each in words if each.startswith("configs/") or re.match(r"\w+\.\w+=", each)])


SHELL_IS_NAMED = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
"""Environment in which the shell is an argument; else it is the one that has started the program."""


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("zsh", "fish"))]
)
def test_completion_offers_verbs_and_options(shell: str) -> None:
    def offered(typed: str) -> set[str]:
        asked = {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        if shell == "bash":
            asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = mtrain(**asked, _MTRAIN_COMPLETE=f"complete_{shell}")
        assert (done.returncode, done.stderr) == (0, ""), done
        found = done.stdout.removeprefix("_arguments '*: :((")  # of zsh
        return set(re.findall(r"^\"?([\w-]+)", found, re.MULTILINE))

    assert offered("mtrain ") >= {name for group in VERBS.values() for name in group}
    if shell == "bash":  # what is offered depends on the words, not on the shell that asks
        assert offered("mtrain convert ") == {"import", "export", "verify", "inspect"}
        assert "--checkpoint" in offered("mtrain convert export --c")
    script = mtrain("--show-completion", shell, **SHELL_IS_NAMED)
    assert f"_MTRAIN_COMPLETE=complete_{shell}" in script.stdout, script


def test_completion_is_installed_where_the_shell_reads_it(tmp_path: Path) -> None:
    done = mtrain("--install-completion", "bash", HOME=str(tmp_path), **SHELL_IS_NAMED)
    assert (done.returncode, done.stderr) == (0, ""), done
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {tmp_path / ".bashrc", tmp_path / ".bash_completions" / "mtrain.sh"}
    assert "_MTRAIN_COMPLETE" in (tmp_path / ".bash_completions" / "mtrain.sh").read_text()


def test_options_of_a_verb_are_listed_in_sections() -> None:
    _, text = call("launch", "slurm", "--help")
    sections = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert sections == [
        "Arguments:",
        "Options:",
        "The job:",
        "Its ranks:",
        "In a container:",
        "A service instead of a run:",
    ]
    assert text.index("Its ranks:") < text.index("--ntasks-per-node") < text.index("In a container:")


def test_a_verb_that_is_not_there_names_the_nearest() -> None:
    code, text = call("chec")
    assert (code, "No such command 'chec'. Did you mean 'check'" in text) == (2, True)


def test_a_verb_of_a_verb_is_named_in_full_and_another_one_never() -> None:
    """No letters make `report` of `export`."""
    code, text = call("export")
    assert (code, "Did you mean mtrain convert export?" in text) == (2, True)
    assert "Did you mean" not in call("compile")[1]
    assert "Did you mean 'parity'?" in call("verify", "paritty")[1]


def test_check_prints_the_plan_in_plain_lines(config_path: Path) -> None:
    overrides = ["layout.tp=2", "layout.sp=true", "layout.pp=2", "layout.vpp=2", "train.micro_batch_size=2"]
    unneeded = ("torch", "rich", "mtrain.hf.schema.registry", "mtrain.plan.search.search")
    done = mtrain_without(unneeded, "check", config_path, *overrides, "--world-size", 8)
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line[:18].strip(): line[18:] for line in done.stdout.splitlines()}
    assert lines["layout"] == "tp2sp-pp2vpp2-cp1-dp2 on 8 ranks"
    assert lines["batch"] == "16 samples = 4 microbatches x 2 x dp 2"
    assert lines["tokens per step"] == "1,024"
    assert lines["parameters"].startswith("424,000 (427,072 with")
    assert lines["FLOPs per token"].endswith("e+06")
    assert "\x1b" not in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.split()[:2] in (["0", "4"], ["1", "4"])]) == 2


def test_check_reports_every_broken_rule(config_path: Path) -> None:
    done = mtrain("check", config_path, "layout.sp=true", "train.num_step=3", "data.seq_length=-1", "--world-size", 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(
        key in done.stderr for key in ("layout.sp=true needs", "did you mean train.num_steps?", "data.seq_length:")
    )


def test_check_refuses_a_world_size_that_does_not_fit(config_path: Path) -> None:
    done = mtrain("check", config_path, "layout.tp=2", "--world-size", 3)
    assert done.returncode == 2
    assert done.stderr.startswith("error: world size 3 must be a multiple of 2")


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["check"], ["check", "x.yaml"], ["launch", "local", "x.yaml"]], ids=str
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    done = mtrain(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_train_checks_the_configuration_before_torch_is_loaded(config_path: Path) -> None:
    done = mtrain("train", config_path, "layout.tpp=2")
    assert done.returncode == 2
    assert done.stderr == ("error: layout.tpp: there is no such key; did you mean layout.tp? (in the command line)\n")


def test_train_checks_the_world_size_before_torch_is_loaded(config_path: Path) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    done = mtrain("train", config_path, "layout.cp=2", **torchrun)
    assert done.returncode == 2
    assert done.stderr.startswith("error: world size 3 must be a multiple of 2")


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_a_wrong_configuration_is_reported_by_rank_0_alone(config_path: Path, name: str) -> None:
    torchrun = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    srun = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n"}
    environment = {name: "1"} | (torchrun if name == "RANK" else srun)
    done = mtrain("train", config_path, "layout.tpp=2", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_wrong_environment_is_reported_by_the_rank_that_has_it(config_path: Path) -> None:
    done = mtrain("train", config_path, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 7
    assert done.stderr.startswith("error: [rank 1] the environment variable LOCAL_RANK is not set")


def test_what_was_not_foreseen_keeps_its_traceback_with_the_rank(config_path: Path) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    done = mtrain("train", config_path, **torchrun)  # continues to torch, which is not there
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert done.stderr.count("Traceback") == 1


def test_launch_checks_the_configuration_before_a_rank_starts(config_path: Path, tmp_path: Path) -> None:
    done = mtrain("launch", "local", "-n", 2, config_path, "layout.tp=4")
    assert done.returncode == 2
    assert done.stderr == (
        "error: world size 2 must be a multiple of 4 = layout.tp=4 x layout.pp=1 x layout.cp=1; "
        "start more ranks or shrink the layout\n"
    )
    assert not (tmp_path / "run").exists()


def test_arguments_with_an_equals_sign_are_overrides_unless_a_file_has_that_name(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.yaml"
    odd.touch()
    assert split_arguments([str(odd), "layout.tp=2", "c.yaml"]) == ([odd, Path("c.yaml")], ["layout.tp=2"])


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("auto", "0,1")])
def test_a_run_on_cpus_hides_the_gpus_of_its_machine(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    loaded_config([str(config_path), f"train.device={device}"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_an_override_may_be_longer_than_a_file_name_can_be(config_path: Path) -> None:
    corpora = ", ".join(f"{{path: source_{number}_text_document, weight: {number}.5}}" for number in range(1, 13))
    override = f"data.train=[{corpora}]"
    assert len(override) > 255
    done = mtrain("check", config_path, "data.kind=indexed", override, "--world-size", 1, "--without-files")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.fault(
    "input", "a name of a file that is longer than any can be", happens="the name is refused in one line", exit_code=2
)
def test_a_file_name_that_cannot_be_is_refused(config_path: Path, notice: Notice) -> None:
    with notice:
        done = mtrain("check", config_path, "x" * 5000, "--world-size", 1)
    assert done.returncode == notice.exit_code
    assert len(done.stderr.splitlines()) == 1
    assert "File name too long" in done.stderr


def test_an_interrupt_inside_a_string_that_is_run_has_its_exit_code(tmp_path: Path) -> None:
    """An interrupt may come while data classes are made; Python itself would then end as if SIGINT had killed it, only
    under `-m`."""
    (tmp_path / "interrupted.py").write_text(
        "import mtrain.cli.main\n"
        "from mtrain import __main__\n"
        "mtrain.cli.main.app = lambda **_: exec('raise KeyboardInterrupt')\n"
        "__main__.main()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "interrupted", "check"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode == 130
