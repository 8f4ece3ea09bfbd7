"""Kept ranks under the name that all tests use."""

import pytest

from tests.verify.kept import KeptPool


@pytest.fixture
def pool(kept: KeptPool) -> KeptPool:
    """Gives the kept ranks to tests of faults that are found in one step."""
    return kept
