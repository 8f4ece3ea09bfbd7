"""Ranks of which one opens its data late; for `test_run.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.verify import hf
from mtrain.verify.planted.collaborators import Collaborators


class _Built(Exception):  # noqa: N818
    """Ends a rank where its model would be built."""


def num_open(groups: Groups, config: Config, folder: str) -> int:
    """Returns how many ranks had their data when this one went on to build its model, which waits in collectives."""

    class Late(StepLoader):
        """Opens its data later on higher ranks."""

        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.5 * groups.rank)
            super().__init__(*arguments)
            Path(folder, str(groups.rank)).touch()

    def stop(*_: object, **__: object) -> None:
        raise _Built

    with mock.patch.object(hf, "SOUND", Collaborators(loader=Late)), mock.patch.object(hf, "build_model", stop):
        try:
            hf.run_from_hf(groups, config, 1, None)
        except _Built:
            return len(list(Path(folder).iterdir()))
    raise AssertionError("no model was built")
