"""Calls the program within the test's process, and shows what its verbs take."""

import shlex
from collections.abc import Mapping
from typing import Any

import typer
from typer.testing import CliRunner

from mtrain.cli.main import app


def call(*arguments: object) -> tuple[int, str]:
    """Calls the program; returns exit code and all output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def blocking(packages: tuple[str, ...]) -> str:
    """Returns the first lines of a program in which importing one of these packages is an error, though they can be
    found."""
    return f"""
import sys
def refuse(event, arguments):
    if event == "import" and arguments[0].split(".")[0] in {packages}:
        raise ImportError(arguments[0])
sys.addaudithook(refuse)
"""


def command(*names: str) -> Any:
    """Returns the verb of this name, as typer has built it."""
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.get_command(None, name)
    return found


def options(verb: Any) -> Mapping[str, Any]:
    """Returns the default of each option and argument, by longest name."""
    return {max(each.opts, key=len): each.default for each in verb.params if each.name != "help"}


def parsed(line: str) -> dict[str, Any]:
    """Returns the arguments of a command line, without `mtrain`, as its verb would get them; a wrong one raises."""
    verb: Any = typer.main.get_command(app)
    words = shlex.split(line)
    while hasattr(verb, "commands"):
        verb = verb.get_command(None, words.pop(0))
    with verb.make_context("mtrain", words) as context:
        found: dict[str, Any] = context.params
    return found
