"""The program that renders a chat template: a separate process, which `sandbox` starts and limits.

A template comes from others, so it may loop forever or fill the memory, in Python or inside one C call that no handler
can interrupt. Operating-system limits cover both: the address space is capped, and a timer of processor time ends the
process. It is started by its path, with the folders of the packages that it imports as arguments, and imports nothing
from mtrain. Requests and replies are JSON objects, one a line.

    first line    {"template", "date", "marks", "cpu_s", "memory_bytes", "max_chars", ...} -> {"variables"} or {"error"}
    other lines   {"messages", "tools", "variables", "cuts": [[number, prompt, marked]]}  -> {"texts"} or {"error"}

A text is [number of characters that it shares with the first text, the rest], so the size of a reply grows with
the conversation and not with its square. A cut requests the rendering of the first `number` messages, with or without
the prompt for an answer and marks around `{% generation %}`; its text is {"error": ...} where the template refuses it.
"""

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

sys.path[:0] = sys.argv[1:]  # site-packages alone: no other code of the user must be imported

from jinja2 import meta, nodes  # noqa: E402
from jinja2.exceptions import SecurityError, TemplateError  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from jinja2.utils import Namespace  # noqa: E402

_LONGEST_MESSAGE = 300
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a scheduler, which are for the run; the run ends this process."""


def main() -> None:
    """Answers requests until the input ends, when the requesting process has exited."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.buffer.readline())
    _limit(settings)
    signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])  # its signal ends the process, wherever it is
    try:
        renderer = _Renderer(settings)
    except Exception as fault:  # whatever a hostile template makes the compiler raise
        _reply({"error": _message(fault)})
        return
    _reply({"variables": renderer.variables})
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])
        _reply(renderer.answer(line))


def _reply(reply: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(settings: dict[str, Any]) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),  # a template has nothing to write
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


class _Renderer:
    """The compiled template and its environment."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._environment = _environment(settings["date"])
        self._marks, self._max_chars, self._cpu_s = settings["marks"], settings["max_chars"], settings["cpu_s"]
        self._replaced: dict[str, str] = settings["replaced"]
        self._template = self._environment.from_string(settings["template"])
        self.variables = sorted(meta.find_undeclared_variables(self._environment.parse(settings["template"])))
        """Names that the template reads and does not set."""

    def answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            texts: list[Any] = []
            sent, first = 0, None
            for number, prompt, marked in request["cuts"]:
                signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
                text = self._rendered(request, number, prompt, marked)
                if isinstance(text, dict):
                    texts.append(text)
                    continue
                common = _common_prefix(first or "", text)
                texts.append([common, text[common:]])
                sent += len(text) - common
                if first is None:
                    first = text
                if sent > self._max_chars:
                    return {"error": f"it writes more than {self._max_chars} characters"}
            return {"texts": texts}
        except Exception as fault:  # a conversation that is nested too deeply, or too large for the memory
            return {"error": _message(fault)}

    def _rendered(self, request: dict[str, Any], number: int, prompt: bool, marked: bool) -> str | dict[str, str]:
        self._environment.marks = self._marks if marked else ("", "")  # type: ignore[attr-defined]
        variables = {
            **request["variables"],
            "messages": request["messages"][:number],
            "tools": request["tools"],
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            text = self._template.render(variables)
        except Exception as fault:
            return {"error": _message(fault)}
        for written, whole in self._replaced.items():
            text = text.replace(written, whole)
        return text


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:  # halves, as comparing two slices costs far less than a loop over characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _message(fault: Exception) -> str:
    name = type(fault).__name__
    text = " ".join(str(fault).split())
    if name == "TemplateError":  # raised by the template itself, with raise_exception
        return f"it says: {text}"[:_LONGEST_MESSAGE]
    if name == "MemoryError":
        return "it needs more memory than it may have"
    line = f", line {fault.lineno}" if hasattr(fault, "lineno") else ""
    return f"{name}: {text}{line}"[:_LONGEST_MESSAGE]


class Generation(Extension):
    """The block `{% generation %}` ... `{% endgeneration %}` around the text that the model writes."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        first, last = self.environment.marks  # type: ignore[attr-defined]
        return f"{first}{caller()}{last}"


class Variables(Namespace):
    """A namespace without Python's own names."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *positional = args
        for name in dict(*positional, **values):
            _refuse_private(name)
        Namespace.__init__(self, *positional, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class Dictionaries:
    """`dict(...)` without the attributes of a type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, but got {name!r}")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(date: str | None) -> ImmutableSandboxedEnvironment:
    """Builds an environment with everything that transformers offers a template.

    Source: transformers 5.23, utils/chat_template_utils.py, _cached_compile_jinja_template.
    """

    def strftime_now(form: str) -> str:
        if date is None:
            raise ValueError("it writes the date of today, which differs from start to start; set data.chat_date")
        return datetime.datetime.fromisoformat(date).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    # a sample is a pure function of its record, so nothing may be drawn at random
    del environment.globals["lipsum"], environment.filters["random"]
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "dict": Dictionaries(),
        "namespace": Variables,
    }
    return environment


if __name__ == "__main__":
    main()
