"""Lines of the package's loggers (`mtrain.*`), as the command line shows them; other programs configure `logging`."""

import logging
import sys


class _StandardStreams(logging.Handler):
    """Writes plain messages to standard output, and from WARNING on to standard error."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Writes without the handler's lock: a line that hangs on a dead disk must not block other threads."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Writes to the current streams, which a program may replace; their errors go to the caller."""
        print(record.getMessage(), file=sys.stdout if record.levelno < logging.WARNING else sys.stderr, flush=True)


def show_lines() -> None:
    """Shows the package's lines on the standard streams and to no other handler."""
    logger = logging.getLogger("mtrain")
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [_StandardStreams()], False
