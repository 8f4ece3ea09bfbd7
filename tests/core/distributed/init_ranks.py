"""What ranks do in the tests of the world."""

import time
from contextlib import suppress
from pathlib import Path

from mtrain.base.errors import DataError, MachineError
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import joined_distributed, on_first_rank, with_the_slowest
from mtrain.core.ranks.party import Purpose


def rounds_with_a_slow_rank(groups: Groups, folder: str) -> list[int]:
    """Returns how many ranks had begun each of two rounds when this rank went on; each round has another slow rank."""
    seen = []
    for number in range(2):

        def begin(number: int = number) -> None:
            time.sleep(0.3 * (groups.rank == number))
            Path(folder, f"{number}-{groups.rank}").touch()
            if groups.rank == 2 and number == 1:
                raise DataError("an error of one rank does not keep the others")

        with suppress(DataError):
            with_the_slowest(begin)
        seen.append(len(list(Path(folder).glob(f"{number}-*"))))
    return seen


def result_of_rank_zero(groups: Groups) -> int:
    """Returns rank 0's rank plus 7, on every rank."""
    return on_first_rank(lambda: groups.rank + 7)


def error_of_rank_zero(groups: Groups) -> tuple[str, bool]:
    """Returns what the other ranks see of an error on rank 0."""

    def fail() -> None:
        raise DataError(f"seen on rank {groups.rank}")

    try:
        on_first_rank(fail)
    except DataError as error:
        return str(error), error.on_every_rank
    return "no error", False


def purposes_in_an_open_world(groups: Groups) -> tuple[int, str, bool]:
    """Gives the last rank another configuration; returns exit code, message, and whether every rank raised it."""
    seed = "2" if groups.rank == groups.layout.world_size - 1 else "1"
    fault = MachineError("nobody has noticed")
    try:
        with joined_distributed("cpu", 60, Purpose("Engine", Path(), {"train.seed": seed})):
            pass
    except MachineError as error:
        fault = error
    with joined_distributed("cpu", 60, Purpose("Engine", Path(), {"train.seed": "1"})):
        pass
    return fault.exit_code, str(fault), fault.on_every_rank
