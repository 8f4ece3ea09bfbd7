"""`mtrain.launch`: starts several ranks from a program or a notebook, and shows the output of the first."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from mtrain.base import errors
from mtrain.base.errors import ConfigError, MtrainError
from mtrain.base.notebook import shell
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.config.schema.loss import own_functions
from mtrain.launch.local import INTERRUPTED, prepare_child
from mtrain.report.monitor.training_run import TrainingRun

_log = logging.getLogger(__name__)

_PREFIX = "error: "
_OF_CODE = {
    kind.exit_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MtrainError)
    if kind.__base__ is MtrainError and kind.exit_code != MtrainError.exit_code
}
"""Exit code -> class of the error with this code; code 1 has none."""


def launch(config: Config, ranks: int) -> TrainingRun:
    """Trains with several ranks on this machine, each in its own process, as `mtrain launch local` does.

    Output of rank 0 appears at once; other ranks write to `logs` in the run folder. Ctrl-C, or interrupting the cell,
    ends the run after the current step and saves everything; a second one ends it immediately.

    Args:
        ranks: Number of processes; `layout.*` must fit it, as in `mtrain launch local`.

    Returns:
        The run; `is_complete` says whether it has made all steps.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C in a program outside IPython, or twice.
        MtrainError: The ranks ended with an error; the class follows from their exit code.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"launch needs a Config from load_config, but got a {type(config).__name__}")
    if names := [name for name in own_functions(config.loss) if name.startswith("__main__:")]:
        raise ConfigError(
            f"loss.function={names[0]} is defined in this program or notebook, which the processes of the ranks cannot "
            f"import; write it into a module, and name it as losses:{names[0].partition(':')[2]}"
        )
    run = TrainingRun(Path(config.run.dir))
    with tempfile.TemporaryDirectory(prefix="mtrain-launch-") as folder:
        save_config(config, path := Path(folder) / "config.yaml")
        code, message, is_interrupted = _streamed(["launch", "local", "-n", str(ranks), str(path)])
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        raise _OF_CODE.get(code, MtrainError)(message or f"the ranks have ended with exit code {code}")
    if is_interrupted:
        if shell() is None:
            raise KeyboardInterrupt(repr(run))
        _log.warning(f"stopped; everything is saved, and the same call continues the run ({run!r})")
    return run


def _streamed(arguments: list[str]) -> tuple[int, str, bool]:
    """Runs a verb and copies its output to standard output; passes Ctrl-C on as one signal.

    Returns:
        Exit code, the first error message, which is not copied, and whether Ctrl-C was pressed.
    """
    # a notebook's kernel sets these, and rich would draw a terminal's bar into the pipe
    environment = {name: text for name, text in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    process = subprocess.Popen(
        [sys.executable, "-m", "mtrain", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C reaches the launcher once, through us
        preexec_fn=partial(prepare_child, os.getpid()),
    )
    message, is_interrupted = "", False
    assert process.stdout is not None
    while True:
        try:
            for line in process.stdout:
                if line.startswith(_PREFIX) and not message:
                    message = line.removeprefix(_PREFIX).rstrip()
                else:
                    sys.stdout.write(line)
                    sys.stdout.flush()
            return process.wait(), message, is_interrupted
        except KeyboardInterrupt:
            is_interrupted = True
            process.send_signal(signal.SIGINT)
