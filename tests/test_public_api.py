"""Tests of `import mtrain`: what a program may rely on, loaded at its first use."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mtrain
from tests.paths import ROOT

HEAVY = "{'torch', 'numpy', 'megatron', 'pydantic', 'yaml', 'transformers'}"


def run(program: str) -> str:
    """Returns what a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, cwd=ROOT
    )
    return result.stdout.strip()


def test_importing_it_imports_nothing_heavy() -> None:
    assert run(f"import sys, mtrain; print(*sorted({HEAVY} & sys.modules.keys()))") == ""


def test_reading_a_configuration_needs_no_torch() -> None:
    program = "import sys; from mtrain import load_config, Config, ConfigError; print('torch' in sys.modules)"
    assert run(program) == "False"


def test_a_receiver_of_weights_needs_torch_alone() -> None:
    names = "{'megatron', 'pydantic', 'yaml', 'transformers'}"
    program = f"import sys; from mtrain import WeightCopy, receive_hf_tensors; print({names} & sys.modules.keys())"
    assert run(program) == "set()"


@pytest.mark.parametrize("name", mtrain.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(mtrain, name) is not None
    assert name in dir(mtrain)


def test_an_unknown_name_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'mtrain' has no attribute 'Motor'"):
        mtrain.Motor  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        exec("from mtrain import Motor")


@pytest.mark.parametrize("module", ["mtrain.loss.pair", "mtrain.loss.diagnostics"])
def test_losses_written_for_version_0_2_import_the_same_things(module: str) -> None:
    old = importlib.import_module(module)
    shared = [name for name in mtrain.__all__ if hasattr(old, name) and not name.startswith("__")]
    assert {"LossPair", "weigh"} <= set(shared) or {"reports", "diagnosed"} <= set(shared)
    assert all(getattr(old, name) is getattr(mtrain, name) for name in shared)


def test_what_is_listed_for_type_checkers_is_what_is_loaded() -> None:
    assert sorted([*mtrain._MODULE_OF, "__version__"]) == sorted(mtrain.__all__)
    assert (Path(mtrain.__file__).parent / "py.typed").exists()


@pytest.mark.nightly  # by day mypy checks the package, whose names are compared above
def test_a_users_program_is_checked_against_its_types(tmp_path: Path) -> None:
    """Checks that a wrong argument is a type error, and so are misspelt public names."""
    program = tmp_path / "program.py"
    program.write_text(
        "from mtrain import Datum, Engine, LossPair, TermInputs, load_config, weigh\n"
        "def loss(inputs: TermInputs) -> LossPair:\n"
        "    return weigh(inputs.logits.cross_entropy(inputs.labels), inputs)\n"
        "engine = Engine(load_config(['a.yaml']))\n"
        "engine.forward_backward([Datum([1, 2])], loss)\n"
        "reveal_type(engine.optim_step().loss)\n"
        "engine.optim_step('fast')\n"
        "engine.forward_backward([[1, 2]])\n"
        "from mtrain import Motor\n"
    )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(program)]
    command += ["--python-version", version]  # numpy's types for a newer one cannot be read as those of an older one
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert re.search(r':6: note: Revealed type is "(builtins\.)?float"', result.stdout), result.stdout
    # those of the package, which tests/check.sh checks, depend on the types of the torch and numpy that are installed
    faults = [line for line in result.stdout.splitlines() if re.search(rf"{program.name}:\d+: error: ", line)]
    assert len(faults) == 3, result.stdout
    assert ':7: error: Argument 1 to "optim_step"' in faults[0]
    assert ":8: error: List item 0 has incompatible type" in faults[1]
    assert ':9: error: Module "mtrain" has no attribute "Motor"' in faults[2]
