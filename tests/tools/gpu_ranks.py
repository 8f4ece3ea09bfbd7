"""Sections of tools/bench/gpu.py on a CPU; the rank side of test_gpu_bench.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtrain.core.ranks.groups import Groups
from tests.training.engine_ranks import free
from tools.bench.gpu import SECTIONS, answer_of
from tools.bench.one_gpu import reference
from tools.bench.one_gpu.shapes import Bench

TINY = Bench("cpu", is_tiny=True)


def answers(groups: Groups, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Runs sections one after the other in one process; at last the first one again, with a judge of other rotary
    angles."""
    with free(groups):
        found = {name: answer_of(SECTIONS[name], TINY) for name in names}
        reference.ROPE_BASE = 10100.0
        return found | {"judged otherwise": answer_of(SECTIONS[names[0]], TINY)}
