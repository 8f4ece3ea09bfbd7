"""Every fault is planted on something that is there: a target that was renamed is named here, without training."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.paths import ROOT

FILES = ("verify/planted/faults.py", "verify/planted/shared_faults.py", "verify/resume/faults.py")


def targets(path: Path) -> list[tuple[str, str]]:
    """(owner as written, name of the attribute) of every `replaced(owner, "name", ...)`."""
    return [
        (ast.unparse(node.args[0]), node.args[1].value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "replaced"
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[1].value, str)
    ]


@pytest.mark.parametrize("file", FILES)
def test_what_is_replaced_exists(file: str) -> None:
    module = importlib.import_module("mtrain." + file.removesuffix(".py").replace("/", "."))
    source = ROOT / "mtrain" / file
    found = targets(source)
    assert len(found) == source.read_text().count("replaced(") - source.read_text().count("def replaced(")
    missing = [f"{owner}.{name}" for owner, name in found if name not in vars(eval(owner, vars(module)))]
    assert missing == []


def test_a_target_that_is_gone_is_seen(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text('replaced(step, "gone", None)')
    assert targets(tmp_path / "faults.py") == [("step", "gone")]
