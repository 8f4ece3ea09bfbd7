"""Adams that count updates by group of parameters, not for each parameter."""

from pathlib import Path

from mtrain.plan.layout import Layout
from tests.mcore.engine import fused_adam_ranks
from tests.mcore.state.test_save_and_load import TIED, assert_same_standing, configured
from tests.pool import Pool


def test_resuming_is_exact_with_an_adam_that_counts_by_group(pool: Pool, tmp_path: Path) -> None:
    """Ranks that hold nothing of a group skip its count: here one rank holds only a part of the table, no norm."""
    layout, config = Layout(dp=2), configured(**TIED, **{"model.num_layers": 1, "model.vocab_size": 800})
    straight = pool.run(fused_adam_ranks.train, layout, config, tmp_path, None, 4, 2)
    resumed = pool.run(fused_adam_ranks.train, layout, config, tmp_path, 2, 4, 3)
    assert {holds_nothing for _, holds_nothing in straight} == {False, True}
    for (one, _), (other, _) in zip(straight, resumed):
        assert one.saved is not None
        assert_same_standing(one.saved, other.begin)
        assert one.steps[2:] == other.steps
        assert_same_standing(one.end, other.end)
        assert (other.begin.adam_step, other.end.adam_step) == (2, 4)
