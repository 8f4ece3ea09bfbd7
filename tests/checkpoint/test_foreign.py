"""Where checkpoints of Megatron-LM and Megatron-Bridge lie."""

from pathlib import Path

import pytest

from mtrain.checkpoint.foreign import foreign_folder
from mtrain.errors import DataError


def iteration(folder: Path) -> Path:
    """An iteration's folder with a list of tensors."""
    folder.mkdir()
    (folder / ".metadata").touch()
    return folder


@pytest.mark.parametrize(("latest", "name"), [("100\n", "iter_0000100"), ("release", "release")])
def test_an_iteration_is_found_by_its_folder_and_by_the_latest(tmp_path: Path, latest: str, name: str) -> None:
    folder = iteration(tmp_path / name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    assert foreign_folder(folder) == folder
    assert foreign_folder(tmp_path) == folder


def test_our_own_and_others_are_left_alone(tmp_path: Path) -> None:
    own = iteration(tmp_path / "step_00000010")
    (own / "mtrain.json").touch()
    assert foreign_folder(own) is None
    assert foreign_folder(tmp_path) is None
    assert foreign_folder(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("latest", "folder", "words"),
    [
        ("../../etc", "iter_0000100", "neither a number nor `release`"),
        ("200", "iter_0000100", "names iter_0000200, which has no .metadata"),
        ("300", "iter_0000300/mp_rank_00", "one pickled file a rank"),
    ],
)
def test_what_cannot_be_taken_is_refused(tmp_path: Path, latest: str, folder: str, words: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(DataError, match=words):
        foreign_folder(tmp_path)


def test_without_a_latest_an_iteration_has_to_be_named(tmp_path: Path) -> None:
    iteration(tmp_path / "iter_0000100")
    iteration(tmp_path / "iter_0000200")
    with pytest.raises(DataError, match="name a folder such as iter_0000200"):
        foreign_folder(tmp_path)
