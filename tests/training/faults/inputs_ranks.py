"""Functions that ranks run for the tests of inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import newest_good
from mtrain.core.ranks.groups import Groups
from mtrain.training.build import agreed


def agree(groups: Groups, of_rank: Mapping[int, dict[str, str]]) -> str:
    """Returns the refusal of fingerprints that ranks find; empty where they agree."""
    try:
        assert agreed(groups, lambda: of_rank[groups.rank]) == of_rank[groups.rank]
    except DataError as error:
        return str(error)
    return ""


def open_in(groups: Groups, folders: tuple[Path, ...]) -> str:
    """Returns the refusal of the checkpoint below each rank's own folder; empty where all can load it."""
    try:
        with (
            contextlib.chdir(folders[groups.rank]),
            opened_checkpoint(lambda unusable: newest_good(Path("checkpoints"), unusable), lambda text: None),
        ):
            return ""
    except DataError as error:
        return str(error)
