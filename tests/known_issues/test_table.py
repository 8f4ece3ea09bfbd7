"""Checks of the table of known issues: the code it quotes, its conditions, its tests, its page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.config import known_issues
from mtrain.plan.summary import plan_lines
from tests.known_issues.configs import SMALL, assert_refused, megatron_core, small
from tests.known_issues.page import FINDINGS, NUM_FINDINGS, PAGE, UNREAD, findings, page
from tests.known_issues.rows import TABLE, KnownIssue, applicable
from tests.known_issues.rows.row import Place, installed
from tests.known_issues.state_ranks import said_at_the_start
from tests.paths import ROOT
from tests.pool import Pool
from tests.tools.sources import modules


def ids(row: KnownIssue) -> str:
    return row.name.replace(" ", "-")


@pytest.mark.parametrize("row", [row for row in TABLE if row.bites(installed())], ids=ids)
def test_a_row_quotes_code_that_is_there(row: KnownIssue) -> None:
    assert row.places_in(installed())
    for place in row.places_in(installed()):
        found = list(definitions(place))
        assert found, f"megatron-core has no {place}"
        assert any(place.quote in line for lines in found for line in lines), f"{place} has no line {place.quote!r}"


def definitions(place: Place) -> Iterator[list[str]]:
    """Finds the lines of everything that has the name of the place: an import that fails may define it twice."""
    source = (megatron_core() / place.path).read_text()
    if not place.symbol:
        yield source.splitlines()
    below: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while below:
        outer, node = below.pop()
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{outer}.{inner.name}".lstrip(".")
                below.append((name, inner))
                if name == place.symbol:
                    yield source.splitlines()[inner.lineno - 1 : inner.end_lineno]
            elif isinstance(inner, ast.stmt | ast.excepthandler):
                below.append((outer, inner))


@pytest.mark.parametrize("row", TABLE, ids=ids)
def test_a_row_names_files_and_tests_that_exist(row: KnownIssue) -> None:
    assert [path for path in row.modules if not (ROOT / path).is_file()] == []
    assert row.tests
    for name in row.tests:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.parametrize("row", [row for row in TABLE if row.outcome == "refused"], ids=ids)
def test_what_a_row_calls_refused_is_refused(row: KnownIssue) -> None:
    assert row.refused
    for fields in row.refused:
        assert_refused(fields)


def test_names_are_unique() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_no_model_of_theirs_is_built() -> None:
    """Looks for imports of their models; parts of them and specs of layers are used."""
    nodes = [node for module in modules() for node in module.nodes]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    of_models = [node for node in imports if (node.module or "").startswith("megatron.core.models")]
    models = [name.name for node in of_models for name in node.names]
    assert "get_gpt_layer_with_transformer_engine_spec" in models
    assert [name for name in models if name.endswith("Model")] == []


def test_megatron_fsdp_is_not_used() -> None:
    """Looks for its names in the code that calls Megatron-Core; torch's fully_shard is another one."""
    sources = {path: path.read_text() for path in (ROOT / "mtrain" / "core").rglob("*.py")}
    assert any("DistributedDataParallel" in text for text in sources.values())
    assert [
        path
        for path, text in sources.items()
        if re.search(r"megatron_fsdp|megatron\.core\.distributed\.fsdp|FullyShardedDataParallel", text)
    ] == []


LATENT: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
BALANCED: dict[str, Any] = {
    "model__experts": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "bias_update_rate": 0.001,
    },
    "loss__router": {"z_coefficient": 0.001},
}
APPLIES: list[tuple[dict[str, Any], Layout, set[str]]] = [
    ({}, Layout(tp=2), {"gathered logits with labels", "initial weights depend on tp on a GPU"}),
    ({"adapter": {"targets": ["output"]}}, Layout(tp=2), {"sums of tensors with gaps"}),
    ({}, Layout(tp=2, sp=True), {"norms without sequence parallelism"}),
    ({}, Layout(pp=2), {"initial weights depend on the pipeline"}),
    ({}, Layout(pp=2, vpp=2), {"batched transfers at pp = 2", "outputs freed while they are sent"}),
    ({}, Layout(cp=2), {"attention without context parallelism or packing"}),
    ({}, Layout(dp=2), {"averages instead of sums over ranks"}),
    ({"model__vocab_multiple": 128}, Layout(), {"padded vocabulary in the softmax"}),
    ({"train__precision": "fp16"}, Layout(), {"sums overflow in fp16"}),
    ({"train__recompute": "selective"}, Layout(), {"recomputed norms without TransformerEngine"}),
    ({"model__rope": {"scaling": "llama3", "factor": 2}}, Layout(), {"llama3 rope with fixed constants"}),
    ({"model__hidden_dropout": 0.1}, Layout(), {"dropout"}),
    ({"model__mla": LATENT}, Layout(), {"core attention of latent heads"}),
    ({"model__mla": LATENT}, Layout(tp=2), {"gradient of the shared rotary key"}),
    (
        BALANCED,
        Layout(tp=2, sp=True, pp=2),
        {"padding masks after the first stage", "masked counts of auxiliary losses"},
    ),
    (BALANCED, Layout(), {"expert bias under a mask", "auxiliary losses of experts"}),
    ({"model__mtp_depths": 1}, Layout(), {"rolling over the edges of documents", "depths without a loss mask"}),
    (
        {"model": {**SMALL["model"], "mtp_depths": 1, "tied_embeddings": True}},
        Layout(pp=2),
        {"tied embeddings with depths"},
    ),
    ({"optimizer__clip_grad": 1e-6}, Layout(), {"epsilon in clipping"}),
    ({"optimizer__clip_grad": 0.0}, Layout(), {"norm without clipping"}),
]


@pytest.mark.parametrize(
    ("changes", "layout", "names"),
    APPLIES,
    ids=lambda value: ", ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_conditions_hold_where_they_say(changes: dict[str, Any], layout: Layout, names: set[str]) -> None:
    plain = {row.name for row in applicable(small(), Layout())}
    found = {row.name for row in applicable(small(**changes), layout)}
    assert names & plain == set()
    assert names <= found


def test_notes_are_reported_once_by_the_run_and_by_check(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropping = small(model__hidden_dropout=0.1, optimizer__clip_grad=1e-6)
    lines = [f"note: {note.text}" for note in (known_issues.DROPOUT, known_issues.CLIPPING)]
    first, second = pool.run(said_at_the_start, Layout(dp=2), dropping, tmp_path)
    assert (first.splitlines(), second) == (lines, "")
    assert [line for line in plan_lines(dropping, world_size=1) if line.startswith("note: ")] == lines


def test_the_pages_are_the_table() -> None:
    assert PAGE.read_text() == page(), "see the comment at its top for how to write it again"
    assert FINDINGS.read_text() == findings(), "see the comment at its top for how to write it again"


def test_every_finding_of_the_report_has_a_row() -> None:
    numbers = [number for row in TABLE for number in row.findings]
    assert sorted([*numbers, *UNREAD]) == list(range(1, NUM_FINDINGS + 1))
