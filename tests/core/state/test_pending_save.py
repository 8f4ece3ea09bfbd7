"""Ranks find out whether a save is done without waiting for each other."""

from mtrain.arch.layout import Layout
from tests.core.state.save_fault_ranks import answers
from tests.pool import Pool


def test_all_ranks_go_on_at_the_same_poll_and_none_waits_for_another(pool: Pool) -> None:
    for found, at_once in pool.run(answers, Layout(dp=3), [0, 3, 1]):
        # asked in the fourth poll, which none was busy in; answered in the fifth; and from then on
        assert found == [False, False, False, False, True, False]
        assert at_once == [False, False, False, True]
