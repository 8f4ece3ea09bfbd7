"""Code in the guides works as it stands there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.samples import content
from tests.config.yaml_files import write
from tests.paths import ROOT
from tests.warm import completed, program_environment

GUIDE = ROOT / "docs" / "extending" / "loss.md"
WRONG = """

def mean_of_the_call(inputs: TermInputs) -> LossPair:
    pair = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(pair.numerator / inputs.weights.sum().clamp(min=1), pair.denominator)
"""


def write_package(folder: Path) -> None:
    """Writes the functions of the guide, and a wrong one, as a package of a user's own."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "losses.py").write_text("\n\n".join(blocks) + WRONG)


@pytest.mark.parametrize(
    ("function", "changes", "exit_code"),
    [
        ("focal_loss", {"loss__options": {"gamma": 1.5}, "loss__chunk_tokens": 20}, 0),
        ("preference", {"loss__aggregation": "seq-mean-token-sum"}, 0),
        ("mean_of_the_call", {}, 1),
    ],
)
def test_a_loss_of_a_users_package_is_the_same_on_two_layouts(
    tmp_path: Path, function: str, changes: dict[str, Any], exit_code: int
) -> None:
    """One process in float64 is the oracle; a loss that averages by itself is found by the same command."""
    write_package(tmp_path)
    name = f"my_package.losses:{function}"
    config = write(tmp_path / "config.yaml", content(run__dir="run", loss__function=name, **changes))
    command = [sys.executable, "-m", "mtrain", "verify", "parity", str(config), "--layouts", "tp2,cp2", "--steps", "1"]
    done = completed(command, tmp_path, program_environment(tmp_path), timeout=600)
    assert (done.returncode, done.stderr) == (exit_code, ""), done.stdout
    assert "tp2" in done.stdout
    assert "cp2" in done.stdout
    if exit_code:
        assert name in done.stdout, "the report names the function"
