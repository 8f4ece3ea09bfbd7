"""A browser for the pages."""

from collections.abc import Iterator

import pytest

from tests.verify.browser import Browser, browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser, for one file of tests."""
    with browser(tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running
