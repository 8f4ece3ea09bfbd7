"""A warning is an error in the ranks that tests start, unless pyproject.toml names it."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mtrain.arch.layout import Layout
from tests.base import warning_ranks
from tests.paths import ROOT
from tests.pool import Pool, RankFailed


@pytest.mark.parametrize("module", ["mtrain.data.loader", "tests.parity.ranks", "torchvision"])
def test_a_warning_in_a_rank_is_an_error(pool: Pool, module: str) -> None:
    with pytest.raises(RankFailed, match="DeprecationWarning: something is old"):
        pytest.fail(f"no error under these filters: {pool.run(warning_ranks.filters_of_warning, Layout(), module)}")


@pytest.mark.parametrize("module", ["torch", "megatron.core.utils"])
def test_what_another_package_says_of_itself_is_none(pool: Pool, module: str) -> None:
    assert pool.run(warning_ranks.warn, Layout(), module) == [module]


@pytest.mark.nightly  # a second fork server: seconds of imports
def test_the_folder_of_the_test_that_starts_ranks_does_not_matter(tmp_path: Path) -> None:
    program = f"""
import os
from mtrain.arch.layout import Layout
from tests.base import warning_ranks
from tests.conftest import POOL
from tests.pool import RankFailed
if __name__ == "__main__":
    os.chdir({str(tmp_path)!r})
    try:
        POOL.run(warning_ranks.warn, Layout(), "mtrain.data.loader")
    except RankFailed as failed:
        assert "something is old" in str(failed)
        print("strict")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "strict\n", done.stderr


def test_a_warning_in_a_test_is_an_error() -> None:
    with pytest.raises(UserWarning, match="of ours"):
        warnings.warn("of ours", stacklevel=1)
