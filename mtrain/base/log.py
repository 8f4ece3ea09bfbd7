"""Output of the package's loggers (`mtrain.*`) on the command line; other programs configure `logging` themselves."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class _StandardStreams(logging.Handler):
    """Writes plain messages to standard output; WARNING and above go to standard error."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Writes without the handler's lock: a line that hangs on a dead disk must not block other threads."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Writes to the current streams, which a program may have replaced; errors go to the caller."""
        print(record.getMessage(), file=sys.stdout if record.levelno < logging.WARNING else sys.stderr, flush=True)


def show_lines() -> None:
    """Makes the package's loggers write to the standard streams, and to no other handler."""
    logger = logging.getLogger("mtrain")
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [_StandardStreams()], False


def output_console(plain_width: int = 200) -> Console:
    """Returns a console for standard output; without a terminal its lines are `plain_width` wide, so that rows do not
    wrap."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=plain_width)
