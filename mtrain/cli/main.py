"""The command line: names the verbs. Each is a file; what it needs is imported when it is called, so help is fast."""

import typer

from mtrain.cli.check import check
from mtrain.cli.checkpoints.convert import convert_app
from mtrain.cli.checkpoints.inspect import inspect_app
from mtrain.cli.compare import compare
from mtrain.cli.data.show_batch import show_batch
from mtrain.cli.data.stdlib_corpus import stdlib_corpus
from mtrain.cli.data.tokenize import tokenize
from mtrain.cli.data.train_tokenizer import train_tokenizer
from mtrain.cli.generate import generate
from mtrain.cli.init import init
from mtrain.cli.launch.app import launch_app
from mtrain.cli.plan import plan
from mtrain.cli.plot import plot
from mtrain.cli.report import report
from mtrain.cli.status import status
from mtrain.cli.train import train
from mtrain.cli.verify import verify_app

app = typer.Typer(
    help="Pretrains and finetunes language models on Megatron-Core; the layout does not change the run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_RUNS, _CHECKS, _TEXT, _WEIGHTS = "Runs", "Checks", "Text", "Weights"
"""Groups of the help page."""

app.command(rich_help_panel=_RUNS)(init)
app.command(rich_help_panel=_RUNS)(plan)
app.command(rich_help_panel=_RUNS)(check)
app.command(rich_help_panel=_RUNS)(train)
app.add_typer(launch_app, name="launch", rich_help_panel=_RUNS)
app.command(rich_help_panel=_RUNS)(status)
app.command(rich_help_panel=_RUNS)(report)
app.command(rich_help_panel=_RUNS)(plot)

app.command(rich_help_panel=_CHECKS)(compare)
app.add_typer(verify_app, name="verify", rich_help_panel=_CHECKS)

app.command("show-batch", rich_help_panel=_CHECKS)(show_batch)

app.command("stdlib-corpus", rich_help_panel=_TEXT)(stdlib_corpus)
app.command("train-tokenizer", rich_help_panel=_TEXT)(train_tokenizer)
app.command(rich_help_panel=_TEXT)(tokenize)

app.add_typer(convert_app, name="convert", rich_help_panel=_WEIGHTS)
app.add_typer(inspect_app, name="inspect", rich_help_panel=_WEIGHTS)
app.command(rich_help_panel=_WEIGHTS)(generate)
