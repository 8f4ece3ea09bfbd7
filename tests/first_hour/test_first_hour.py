"""First hour of four kinds of users: each script does what one would type, with the model of examples/real_model.

`bash tests/first_hour/slurm.sh` in a fresh clone is the whole of it, with the installation and the time of each step.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import parsed
from tests.warm import program_environment

FOLDER = Path(__file__).parent
SCRIPTS = sorted(path for path in FOLDER.glob("*.sh") if path.stem != "common")
LAST_WORDS = {
    "convert": "back/from-megatron has the bytes of models/smollm2",
    "elsewhere": "checkpoint step 3,",
    "python": "PASS: 3 layouts are the run of one process",
    "slurm": "134515008",
}
"""What a script prints once its last step but `finish` was right."""


def commands(script: Path) -> list[str]:
    """Returns the lines of a script that call the program, without its variables."""
    lines = script.read_text().replace("\\\n", " ").splitlines()
    found = [line.removeprefix("step mtrain ").split(" &")[0] for line in lines if line.startswith("step mtrain ")]
    return [re.sub(r'"\$\{large\[@\]\}"', "a.yaml b.yaml", line).replace("$root", ".") for line in found]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_commands_are_taken(script: Path) -> None:
    assert len(commands(script)) >= 2
    for line in commands(script):
        parsed(shlex.join(shlex.split(line)))


@pytest.mark.nightly  # minutes; what the verbs do is tested by day
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_user_gets_there(script: Path, tmp_path: Path) -> None:
    environment = {**program_environment(), "MTRAIN_VENV": sys.prefix, "FIRST_HOUR": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert LAST_WORDS[script.stem] in done.stdout
    assert "Traceback" not in done.stderr
    if script.stem == "slurm":
        assert "ended with 0" in done.stdout, "an interrupted run ends well"
        assert re.search(r"loading runs/support/checkpoints/step_0{6}[0-9]+\b", done.stdout), "and goes on"
