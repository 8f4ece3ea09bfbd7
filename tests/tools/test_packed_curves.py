"""Checks that the pages on packing, hybrids and images agree with the data of their pictures."""

import json

import pytest

from tests.paths import DOCS


@pytest.mark.parametrize(("picture", "page"), [("packed_curves", "data/packing"), ("hybrid_curves", "proof/hybrids")])
def test_packed_curves_are_those_without_packing(picture: str, page: str) -> None:
    measured = json.loads((DOCS / f"pictures/{picture}.json").read_text())
    text = (DOCS / f"{page}.md").read_text()
    alone, *others = measured["runs"].values()
    found = [
        {
            name: max(abs(one - value) / one for one, value in zip(alone[name], other[name], strict=True))
            for name in alone
        }
        for other in others
    ]
    assert len(alone["loss"]) >= 60
    assert alone["loss"][-1] < alone["loss"][0] - 1, "it has learned"
    assert found[0]["loss"] < 1e-6
    assert found[0]["grad_norm"] < 1e-4
    assert all(faulty["grad_norm"] > 10 * found[0]["grad_norm"] for faulty in found[1:])
    for apart, written in zip(found, measured["largest_difference"].values(), strict=True):
        for name, value in apart.items():
            assert f"{value:.1e}" == f"{written[name]:.1e}"
            assert f"{value:.1e}" in text
    assert measured["command"] in text


def test_mistakes_with_images_move_gradients() -> None:
    found = json.loads((DOCS / "pictures/naive_images.json").read_text())
    ours, *others = found.values()
    assert max(ours.values()) < 1e-5
    assert len(others) == 6
    assert all(faulty["gradient"] > 0.2 for faulty in others)
    assert all(faulty["loss"] < 3e-3 for faulty in others)
    text = (DOCS / "training/images.md").read_text()
    for label, deviation in found.items():
        assert f"| {label} | {deviation['loss']:.1e} | {deviation['gradient']:.1e} |" in text
