"""Runs notebooks of examples/ in IPython's own shell, as a kernel does, and writes the pages that show their outputs.

`python -m tests.docs.notebooks` regenerates the pages. A kernel would need ten more packages than the shell.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.paths import ROOT
from tests.warm import Command, completed, program_environment

PAGES = {"first_hour.ipynb": "docs/start/notebook.md", "own_loss.ipynb": "docs/extending/loss-notebook.md"}
"""Notebook of examples/ -> page that shows it with its outputs."""

Cell = dict[str, Any]
Output = dict[str, Any]


def cells_of(notebook: Path) -> list[Cell]:
    """Returns the cells of a notebook file; `source` is a text."""
    cells = json.loads(notebook.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def code(*sources: str) -> list[Cell]:
    """Returns cells of code."""
    return [{"cell_type": "code", "source": source, "metadata": {}} for source in sources]


def executed(cells: Sequence[Cell], folder: Path, environment: Mapping[str, str] | None = None) -> list[list[Output]]:
    """Runs the cells of code in a process of their own, and returns the outputs of each, in the notebook's format.

    Args:
        cells: Cells of a notebook.
        folder: Working folder.
        environment: Whole environment, by default `program_environment()`.

    Returns:
        Outputs of each cell of code: an output that was replaced has its last content and the number of `updates`.
    """
    given, found = folder / ".cells.json", folder / ".outputs.json"
    given.write_text(json.dumps([cell["source"] for cell in cells if cell["cell_type"] == "code"]))
    program = [sys.executable, __file__, str(given), str(found)]
    found_by_path = os.environ.get("PATH", "").split(
        ":"
    )  # without mtrain, as in a kernel whose environment is not active
    path = ":".join(each for each in found_by_path if not (Path(each) / "mtrain").exists())
    done = completed(program, folder, {**(environment or program_environment()), "PATH": path})
    assert done.returncode == 0, done.stderr
    outputs: list[list[Output]] = json.loads(found.read_text())
    return outputs


def text_of(outputs: Sequence[Output]) -> str:
    """Returns what the outputs of a cell say: streams, plain texts and errors."""
    texts = [each.get("text") or each.get("data", {}).get("text/plain") or each.get("traceback") for each in outputs]
    return "\n".join("\n".join(text) if isinstance(text, list) else str(text) for text in texts)


class WarmLauncher:
    """Launcher whose processes are forked where all is imported; has the part of subprocess.Popen that is used."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        """Starts the launcher."""
        pipe = Path(tempfile.mkdtemp(prefix="mtrain-pipe-"), "output")
        os.mkfifo(pipe)
        self._command = Command(arguments, Path.cwd(), env, device=pipe)
        self.stdout = pipe.open(errors="replace")
        self.wait, self.send_signal = self._command.wait, self._command.send_signal


def _run_cells(sources: Sequence[str]) -> Iterator[list[Output]]:
    """Runs cells one after another in this process, up to the first error that is none of ours."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    from mtrain.launch import streamed

    vars(streamed)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": WarmLauncher})
    outputs: list[Output] = []

    class Shell(InteractiveShell):
        def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
            outputs.append({"output_type": "error", "ename": etype.__name__, "traceback": stb})

    class Publisher(DisplayPublisher):
        def publish(self, data: Any, *args: object, transient: Any = None, update: bool = False, **_: object) -> None:
            name = (transient or {}).get("display_id")
            old = [each for each in outputs if name is not None and each.get("id") == name]
            if update and old:
                old[0].update(data=data, updates=old[0]["updates"] + 1)
            else:
                outputs.append({"output_type": "display_data", "data": data, "id": name, "updates": 0})

    class Hook(DisplayHook):
        def __call__(self, result: Any = None) -> None:
            if result is not None:
                data, _ = self.shell.display_formatter.format(result)
                images = {kind: base64.b64encode(item).decode() for kind, item in data.items() if type(item) is bytes}
                outputs.append({"output_type": "execute_result", "data": {**data, **images}})

    shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
    shell.display_pub = Publisher(shell=shell)
    shell.display_trap.hook = shell.displayhook = Hook(shell=shell)
    for source in sources:
        outputs.clear()
        streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
        with contextlib.redirect_stdout(streams["stdout"]), contextlib.redirect_stderr(streams["stderr"]):
            shell.run_cell(source, store_history=True)
        written = [(name, stream.getvalue()) for name, stream in streams.items()]
        yield [{"output_type": "stream", "name": name, "text": text} for name, text in written if text] + outputs


def page_of(cells: Sequence[Cell], outputs: Sequence[Sequence[Output]], pictures: Path) -> str:
    """Returns a notebook and its outputs as a page; writes its pictures, which are named after this path."""
    parts, rest = [], iter(outputs)
    for cell in cells:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        for output in next(rest):
            data = output.get("data", {})
            if "image/png" in data:
                pictures.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![The picture that the cell shows](../pictures/{pictures.name})")
            elif "text/html" in data:
                parts.append(f'<div class="cell-output">{data["text/html"]}</div>')
            else:
                parts.append(f"```text\n{text_of([output]).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def without_numbers(page: str) -> str:
    """Returns a page without what another machine, or another minute, changes."""
    page = re.sub(r"goodput .*|(?<= )[KMG](?=iB)", "", page)  # some of its parts are only there when they take time
    return re.sub(r"\d[\d.,:e+-]*", "#", page)


def main(notebooks: Mapping[str, str] = PAGES) -> None:
    """Regenerates the pages."""
    for name, page in notebooks.items():
        cells = cells_of(ROOT / "examples" / name)
        with tempfile.TemporaryDirectory() as folder:
            outputs = executed(cells, Path(folder))
        picture = ROOT / "docs" / "pictures" / f"notebook_{Path(name).stem}.png"
        (ROOT / page).write_text(page_of(cells, outputs, picture))


if __name__ == "__main__" and len(sys.argv) == 3:
    Path(sys.argv[2]).write_text(json.dumps(list(map(list, _run_cells(json.loads(Path(sys.argv[1]).read_text()))))))
elif __name__ == "__main__":
    main()
