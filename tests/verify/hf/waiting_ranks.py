"""Ranks of which one opens its data late, and ranks with a fault; for `test_run.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

from mtrain.config import Config
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.verify import hf
from mtrain.verify.hf import HfSteps
from tests.verify.planted.image_faults import ON_OWN_DATA
from tests.verify.planted.shared_faults import SHARED_PLANTS


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

    with mock.patch.object(hf, "StepLoader", Late), mock.patch.object(hf, "build_rank_model", stop):
        try:
            hf.run_from_hf(groups, config, 1, None)
        except _Built:
            return len(list(Path(folder).iterdir()))
    raise AssertionError("no model was built")


def run_with_another_scale(groups: Groups, *arguments: Any) -> HfSteps:
    """Runs steps of attention with a wrong scale."""
    sound = build_rank_model

    def built(*given: Any, **options: Any) -> RankModel:
        model, change = sound(*given, **options), SHARED_PLANTS["softmax-scale-off"].change_model
        assert change is not None
        change(model.chunks)
        return model

    with mock.patch.object(hf, "build_rank_model", built):
        return hf.run_from_hf(groups, *arguments)


def run_with_fault_of_images(groups: Groups, config: Config, num_steps: int, fault: str) -> HfSteps:
    """Runs steps with a fault of `ON_OWN_DATA`."""
    with ON_OWN_DATA[fault].planted():
        return hf.run_from_hf(groups, config, num_steps, None)
