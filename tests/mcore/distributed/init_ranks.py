"""What ranks do in the tests of the world."""

from mtrain.base.errors import DataError
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.distributed.init import on_first_rank


def result_of_rank_zero(groups: Groups) -> int:
    """Rank 0's rank plus 7, on every rank."""
    return on_first_rank(lambda: groups.rank + 7)


def error_of_rank_zero(groups: Groups) -> tuple[str, bool]:
    """What the others learn of a fault on rank 0."""

    def fail() -> None:
        raise DataError(f"seen on rank {groups.rank}")

    try:
        on_first_rank(fail)
    except DataError as error:
        return str(error), error.on_every_rank
    return "no error", False
