"""Lines of the package's loggers (`mtrain.*`), as the command line shows them.

A program of the user's own sees what it asks of `logging` for; `show_lines` is for the command line.
"""

import logging
import sys


class _StandardStreams(logging.Handler):
    """Writes messages to standard output, and from WARNING on to standard error, each at once and without adornment."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Writes without the handler's lock: a line that a dead disk holds must not hold those of other threads."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Writes to the streams of this moment, which a program may replace; what they raise goes to the caller."""
        print(record.getMessage(), file=sys.stdout if record.levelno < logging.WARNING else sys.stderr, flush=True)


def show_lines() -> None:
    """Shows the package's lines on the standard streams of this process, and to no other handler."""
    logger = logging.getLogger("mtrain")
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [_StandardStreams()], False
