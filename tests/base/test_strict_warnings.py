"""A warning is an error in the ranks that tests start, unless pyproject.toml names it."""

import warnings

import pytest

from mtrain.plan.layout import Layout
from tests.base import warning_ranks
from tests.pool import Pool, RankFailed


@pytest.mark.parametrize("module", ["mtrain.data.loader", "tests.parity.ranks", "torchvision"])
def test_a_warning_in_a_rank_is_an_error(pool: Pool, module: str) -> None:
    with pytest.raises(RankFailed, match="DeprecationWarning: something is old"):
        pytest.fail(f"no error under these filters: {pool.run(warning_ranks.filters_of_warning, Layout(), module)}")


@pytest.mark.parametrize("module", ["torch", "megatron.core.utils"])
def test_what_another_package_says_of_itself_is_none(pool: Pool, module: str) -> None:
    assert pool.run(warning_ranks.warn, Layout(), module) == [module]


def test_a_warning_in_a_test_is_an_error() -> None:
    with pytest.raises(UserWarning, match="of ours"):
        warnings.warn("of ours", stacklevel=1)
