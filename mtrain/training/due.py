"""When something happens during a run that does not happen after every step."""

from typing import NamedTuple


class Due(NamedTuple):
    """Steps after which something happens."""

    every: int = 0
    """Number of steps from one time to the next; 0: only where the others say so."""
    at_end: bool = False
    """Whether it happens after the last step, whatever its number."""
    at_start: bool = False
    """Whether it happens before the first step, which is step 0."""

    def after(self, step: int, last: int) -> bool:
        """Says whether it happens after a step of a run with `last` steps."""
        if step == 0:
            return self.at_start
        return (self.every > 0 and step % self.every == 0) or (self.at_end and step == last)
