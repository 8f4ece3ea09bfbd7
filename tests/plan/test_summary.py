"""The summary of a configuration that `mtrain check` prints."""

import pytest

from mtrain.plan.summary import plan_lines
from tests.config.samples import config

PACKED = {"kind": "mock", "seq_length": 64, "isolate_documents": True, "packing": {}}


def test_packed_rows_are_counted_by_their_bound() -> None:
    lines = {
        line[:18].strip(): line[18:]
        for line in plan_lines(config(data=PACKED, train__tokens_per_micro_batch=256), world_size=2)
    }
    assert lines["batch"] == "16 samples = at most 8 microbatches x 1 packed row of 256 x dp 2"
    assert lines["tokens per step"] == "at most 1,024"
    assert lines["tokens of the run"] == "at most 10,240"
    assert lines["FLOPs per step"].startswith("at most ")


def test_steps_that_count_rows_say_so() -> None:
    lines = {
        line[:18].strip(): line[18:]
        for line in plan_lines(
            config(data={**PACKED, "packing": {"batch": "rows"}}, train__tokens_per_micro_batch=256), world_size=2
        )
    }
    assert lines["batch"] == "16 packed rows = 8 microbatches x 1 packed row of 256 x dp 2"
    assert lines["tokens per step"] == "at most 4,096"


def test_the_memory_of_wide_rows_is_that_of_their_positions() -> None:
    def activations(width: int) -> float:
        changes = {"train__global_batch_size": 1024, "train__tokens_per_micro_batch": width}
        return float(plan_lines(config(data=PACKED, **changes), world_size=1)[-1].split()[-3])

    assert activations(65536) == pytest.approx(2 * activations(32768), rel=0.01)


def test_fields_that_pass_to_megatron_are_named_as_proven() -> None:
    assert "deterministic_mode=True (each proven by tests/parity; no other field passes)" in "\n".join(
        plan_lines(config(model__megatron={"deterministic_mode": True}), world_size=1)
    )
    assert "passed" not in "\n".join(plan_lines(config(), world_size=1))


def test_what_activations_pin_on_the_host_has_a_column() -> None:
    def table(**changes: int) -> tuple[str, list[str]]:
        heading, row = plan_lines(
            config(data={"kind": "mock", "seq_length": 65536}, model__num_layers=4, **changes), world_size=1
        )[-2:]
        return heading, row.split()

    heading, plain = table()
    assert heading.endswith("total")
    heading, moved = table(train__offload_layers=2)
    assert heading.endswith("pinned on the host")
    activations, host = float(moved[-4]), float(moved[-1])
    assert activations < float(plain[-3])
    assert host == pytest.approx(float(table(train__offload_layers=4)[1][-1]) / 2, abs=0.002)
    assert host > 0
    heading, updated = table(train__offload_optimizer=True)
    assert heading.endswith("pinned on the host")
    optimizer, kept = float(updated[5]), float(plain[5])
    assert optimizer + float(updated[-1]) == pytest.approx(kept, abs=0.002)
    assert float(updated[-1]) == pytest.approx(2 / 3 * kept, abs=0.002)  # main weights stay
