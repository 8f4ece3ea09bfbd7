"""How a checkpoint is verified before it is loaded."""

import pytest

from mtrain.checkpoint.state.verified import num_threads_of


@pytest.mark.parametrize(
    ("machines", "rank", "num_cores", "num_threads"),
    [
        (["a"], 0, 64, 4),
        (["a"] * 8, 5, 16, 2),
        (["a"] * 8, 5, 2, 1),
        (["a", "a", "b", "b"], 3, 8, 4),
        (["a", "b", "b", "b"], 2, 8, 2),
    ],
)
def test_ranks_of_one_machine_share_its_cores(machines: list[str], rank: int, num_cores: int, num_threads: int) -> None:
    assert num_threads_of(machines, rank, num_cores) == num_threads
