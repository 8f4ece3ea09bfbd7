"""Checks that the page on packing agrees with the data of its picture."""

import json

from tests.paths import DOCS


def test_packed_curves_are_those_without_packing() -> None:
    measured = json.loads((DOCS / "pictures/packed_curves.json").read_text())
    page = (DOCS / "packing.md").read_text()
    alone, packed = measured["runs"].values()
    for name, bound in (("loss", 1e-6), ("grad_norm", 1e-4)):
        assert len(alone[name]) == len(packed[name]) >= 60
        apart = max(abs(one - other) / one for one, other in zip(alone[name], packed[name], strict=True))
        assert f"{apart:.1e}" == f"{measured['largest_difference'][name]:.1e}"
        assert apart < bound
        assert f"{apart:.1e}" in page
    assert alone["loss"][-1] < alone["loss"][0] - 1, "it has learned"
    assert measured["command"] in page
