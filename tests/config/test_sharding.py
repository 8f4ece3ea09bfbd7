"""What does not run with divided weights is refused under its dotted key."""

from typing import Any

import pytest

from tests.config.test_rules import EXPERTS, messages
from tests.messages import check_message

WHOLE_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"layout__etp": 2, "model__experts": EXPERTS}, "layout.etp=2"),
    ({"train__compile": "layers"}, "train.compile=layers"),
    ({"train__offload_layers": 1}, "train.offload_layers=1"),
    ({"train__offload_optimizer": True}, "train.offload_optimizer=true"),
    ({"train__distributed_optimizer": False}, "train.distributed_optimizer=false"),
    ({"train__overlap_grad_reduce": True}, "train.overlap_grad_reduce=true"),
    ({"model__backend": "te"}, "model.backend=te"),
    ({"model__megatron": {"gradient_accumulation_fusion": True}}, "model.megatron.gradient_accumulation_fusion"),
]


@pytest.mark.parametrize(("changes", "fact"), WHOLE_ONLY, ids=[fact for _, fact in WHOLE_ONLY])
def test_what_does_not_run_with_divided_weights_is_named(tmp_path: Any, changes: dict[str, Any], fact: str) -> None:
    (found,) = [line for line in messages(tmp_path, layout__shard="weights", **changes) if "layout.shard" in line]
    assert found.startswith(f"{fact} ")
    check_message(found)
