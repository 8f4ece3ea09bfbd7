"""Layers compiled by torch.compile match the oracle under every kind of layout; what cannot be compiled is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrain.arch.flops import run_flops_per_token
from mtrain.base.certificate import Certificate, Comparison
from mtrain.core.layers import certified
from mtrain.core.layers.certified import layers_of
from mtrain.core.layers.compiled import choose_compilation
from mtrain.verify.core.layouts import Trial
from mtrain.verify.core.shrink import small
from tests.config.samples import config
from tests.core.compiled.compiled_ranks import (
    Compiled,
    graphs_of_generation,
    names,
    train_each,
    trained_without_a_compiler,
)
from tests.fault_table import Notice
from tests.parity.batches import documents_steps, two_steps
from tests.parity.cases import case, lean
from tests.parity.compare import TOLERANCE, Row, deviation, initial_parameters, run_oracle
from tests.parity.expert_models import MIXTRAL, with_experts
from tests.parity.families import DEEPSEEK_ATTENTION, GEMMA, HYBRID, MAMBA
from tests.parity.ranks import Run
from tests.pool import Pool

COMPILED: dict[str, Any] = {"train__compile": "layers"}
REGIONS: dict[str, Any] = {"train__compile": "regions"}
RECOMPUTED = COMPILED | {"train__recompute": "full"}
SELECTIVE = COMPILED | {"train__recompute": "selective", "train__recompute_modules": ["core_attn", "mlp"]}
DOCUMENTS = COMPILED | {"data__isolate_documents": True}
YARN_IN_PART: dict[str, Any] = {
    "model__head_dim": 8,
    "model__rope": {
        "base": 300.0,
        "partial": 0.5,
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_positions": 8,
        "attention_factor": 1.7,
    },
}
ROOMY = with_experts(MIXTRAL, capacity_factor=4.0) | {"loss__allow_layout_dependent": True}
OVERLAPPED = COMPILED | {"train__overlap_grad_reduce": True}


def row(name: str, changes: dict[str, Any], num_layers: int = 2, **layout: Any) -> Row:
    """Builds a row with the fewest layers and microbatches."""
    batches = documents_steps() if changes.get("data__isolate_documents") else two_steps()
    return Row(name, changes, lean(case(**layout), num_layers), batches)


def compiled_rows(pool: Pool, rows: list[Row], backend: str = "eager", **options: Any) -> list[Compiled]:
    """Trains rows of one layout, compares each with the oracle, and returns what rank 0 reports of them."""
    layout = rows[0].case.resolved(rows[0].config)
    runs = [Run(each.config, initial_parameters(each.config), each.batches) for each in rows]
    everyone = pool.run(train_each, layout, runs, backend, *options.values())
    for each, found in zip(rows, everyone[0], strict=True):
        exact = run_oracle(each.config, each.batches)
        assert max(deviation(found.outcome, exact, each.config)) <= TOLERANCE, str(each)
    # the loss has graphs on the last stage alone
    assert all(
        [each.num_graphs > 0 for each in rank] == [each.num_graphs > 0 for each in everyone[0]] for rank in everyone
    )
    found_first: list[Compiled] = everyone[0]
    return found_first


def test_a_layer_is_one_graph_that_all_layers_share(pool: Pool) -> None:
    plain, recomputed = compiled_rows(pool, [row("plain", COMPILED), row("recomputed", RECOMPUTED)])
    assert plain.num_graphs == 1
    assert recomputed.num_graphs == 2  # the first forward pass keeps nothing for backward
    assert plain.printed == recomputed.printed == ""


@pytest.mark.nightly  # traces collectives for seconds; by day a layer alone is one graph
def test_what_the_layout_adds_stays_outside(pool: Pool) -> None:
    (found,) = compiled_rows(pool, [row("tp", COMPILED, num_layers=1, tp=2, sp=True)])
    assert found.num_graphs > 1
    assert found.printed == ""


ROWS = [
    [
        row("documents", DOCUMENTS),
        row("selective", SELECTIVE),
        row("gemma", COMPILED | GEMMA),
        row("hybrid", COMPILED | HYBRID),
        row("yarn in part", COMPILED | YARN_IN_PART),
    ],
    [row("experts", COMPILED | MIXTRAL)],
    [row("pp", COMPILED, pp=2)],
    [row("cp", COMPILED, cp=2)],
    [row("dp", OVERLAPPED, dp=2)],
    [row("experts ep", COMPILED | MIXTRAL, dp=2, ep=2)],
    [row("tp pp", RECOMPUTED, tp=2, sp=True, pp=2)],
]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows[0].name)
def test_compiled_layers_do_not_break_the_promise(pool: Pool, rows: list[Row]) -> None:
    assert all(found.num_graphs and not found.printed for found in compiled_rows(pool, rows))


REGION_ROWS = [
    [
        row("regions", REGIONS),
        row("regions, recomputed", REGIONS | {"train__recompute": "full"}),
        row("regions, gradients added apart", REGIONS | {"model__megatron": {"gradient_accumulation_fusion": False}}),
        row("regions, hybrid", REGIONS | HYBRID),
    ],
]
REGIONS_BY_NIGHT = [
    [
        row("regions, gemma", REGIONS | GEMMA),
        row("regions, yarn in part", REGIONS | YARN_IN_PART),
        row("regions, latents", REGIONS | DEEPSEEK_ATTENTION),
        row("regions, mamba", REGIONS | MAMBA, num_layers=4),
        row("regions, capped logits", REGIONS | {"model__logit_softcap": 3.0, "loss__chunk_tokens": 7}),
    ],
    [row("regions, tp pp", REGIONS | {"loss__chunk_tokens": 7}, tp=2, sp=True, pp=2)],
    [row("regions, cp", REGIONS | {"data__isolate_documents": True}, cp=2)],
    [
        row("regions, ep", REGIONS | MIXTRAL, dp=2, ep=2),
        row("regions, ep with a capacity that drops nothing", REGIONS | ROOMY, dp=2, ep=2),
    ],
]
"""Rows whose regions test_regions.py compares by day, those of experts with another number of tokens, and with none.
Regions hold no collective, so a layout changes nothing but sizes."""


@pytest.mark.parametrize(
    "rows",
    [*REGION_ROWS, *(pytest.param(rows, marks=pytest.mark.nightly) for rows in REGIONS_BY_NIGHT)],
    ids=lambda rows: rows[0].name,
)
def test_compiled_regions_do_not_break_the_promise(pool: Pool, rows: list[Row]) -> None:
    assert all(found.num_graphs and not found.printed for found in compiled_rows(pool, rows, "aot_eager"))


@pytest.mark.nightly
def test_code_that_torch_writes_gives_the_same_numbers(pool: Pool) -> None:
    (found,) = compiled_rows(pool, [row("plain", COMPILED)], "inductor")
    assert found.num_graphs == 1


def test_generation_compiles_nothing(pool: Pool) -> None:
    one = lean(case())
    config = one.config(**COMPILED)
    assert pool.run(graphs_of_generation, one.resolved(config), config) == [0]


def test_names_stay_those_of_plain_layers(pool: Pool) -> None:
    one = lean(case())
    ((plain, compiled),) = pool.run(names, one.resolved(one.config()), one.config())
    assert plain == compiled
    assert len(plain) > 2


@pytest.mark.fault(
    "ranks",
    "a part of a layer that torch cannot compile, with `train.compile`",
    happens="the part runs as it is written, with one note",
    exit_code=None,
)
@pytest.mark.nightly  # by day: without a compiler, which is the same fall-back for all parts
def test_what_cannot_be_compiled_runs_as_it_is_written(pool: Pool, notice: Notice) -> None:
    with notice:
        (found,) = compiled_rows(pool, [row("recomputed", RECOMPUTED)], refused_after=2)
    assert found.num_graphs == 1
    assert found.printed.count("\n") == 1
    assert found.printed.startswith(
        "note: train.compile=layers leaves a part of a layer uncompiled, which torch cannot compile ("
    )
    assert "no such operation" in found.printed


@pytest.mark.fault(
    "ranks",
    "no C++ compiler, with `train.compile`",
    happens="the run goes on with layers as they are written, with one note",
    exit_code=None,
)
def test_without_a_compiler_layers_run_as_they_are_written(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    each = row("plain", COMPILED)
    run = Run(each.config, initial_parameters(each.config), each.batches)
    with notice:
        (found,) = pool.run(trained_without_a_compiler, each.case.resolved(each.config), run, tmp_path)
    assert max(deviation(found.outcome, run_oracle(each.config, each.batches), each.config)) <= TOLERANCE
    assert found.printed.startswith(
        "note: train.compile=layers is ignored, since torch.compile does not work on this machine (InvalidCxxCompiler: "
    )
    assert found.printed.endswith("or set train.compile=none\n")
    assert found.printed.count("\n") == 1


CUDA = torch.device("cuda")
AUTO: dict[str, Any] = {"train__compile": "auto", "model__backend": "torch"}


@pytest.mark.parametrize(
    ("measured", "expected", "said"),
    [
        ({"passed": True, "ms": 1.0, "own_ms": 2.0}, "regions", "1 ms a pass, without 2 ms"),
        ({"passed": True, "ms": 2.0, "own_ms": 1.0}, "none", "2 ms a pass, without 1 ms"),
        ({"passed": False, "ms": 1.0, "own_ms": 2.0}, "none", "their results are wrong"),
    ],
    ids=["faster", "slower", "wrong"],
)
def test_auto_compiles_regions_that_a_certificate_calls_right_and_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any], expected: str, said: str
) -> None:
    here = {"gpu": "NVIDIA H100"}
    monkeypatch.setattr(certified, "machine_of", lambda device: here)
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path))
    asked = config(**AUTO)
    assert choose_compilation(asked, CUDA)[0] == "none"
    other = Certificate("then", {"gpu": "NVIDIA A100"}, layers_of(asked), {"regions": Comparison(**measured)})
    other.save(tmp_path)
    choice, note = choose_compilation(asked, CUDA)
    assert choice == "none"
    assert other.name in note
    assert "NVIDIA A100 and not NVIDIA H100" in note
    known = Certificate("now", here, layers_of(asked), {"regions": Comparison(**measured)})
    known.save(tmp_path)
    choice, note = choose_compilation(asked, CUDA)
    assert choice == expected
    assert known.name in note
    assert said in note
    for kept_out in ({"train__deterministic": True}, {"train__offload_layers": 1}):
        assert choose_compilation(config(**AUTO, **kept_out), CUDA) == ("none", "")


@given(st.floats(-2, 2), st.sampled_from([{}, {"adapter": {"kind": "lora", "rank": 2, "targets": ["qkv"]}}]))
def test_auto_compiles_on_a_cpu_what_is_long_enough(factor: float, changes: dict[str, Any]) -> None:
    one = config(**AUTO, **changes, train__num_steps=1)
    of_step = run_flops_per_token(one) * one.train.global_batch_size * one.data.seq_length
    steps = round(3e13 / of_step * 10**factor)
    long_enough = config(**AUTO, **changes, train__num_steps=steps)
    expected = "regions" if steps * of_step >= 3e13 else "none"
    assert choose_compilation(long_enough, torch.device("cpu")) == (expected, "")
    assert small(long_enough, [Trial()], 32, {}).config.train.compile == "none", "compiling would take longest"
