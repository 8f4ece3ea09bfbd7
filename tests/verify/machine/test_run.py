"""`mtrain verify machine`: a sound machine passes, a wrong collective fails, a slow link is shown and fails nothing."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError, MachineError
from mtrain.cli.main import app
from mtrain.verify.core.result import MachineReport
from mtrain.verify.machine.collectives import MAX_RANKS, collective_deviations, operand
from mtrain.verify.machine.run import (
    FAMILIES,
    MachineCheck,
    MachineRequest,
    collective_layouts,
    family,
    layout_names,
    redacted,
    topology,
    verify_machine,
)
from mtrain.verify.report.page import report_page
from tests.elements import assert_is_accessible, assert_is_self_contained, read_html
from tests.messages import refuses
from tests.pool import Pool
from tests.verify.reports import read_back

CREATED = "2026-11-28T12:00:00+00:00"


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the report of one quick check, called as a user calls it."""
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrain.verify.machine.run.Pool", lambda *given, **options: pool)
        command = ["verify", "machine", "--device", "cpu", "--ranks", "2", "--quick", "--output", str(folder)]
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert f"PASS: 14 checks pass on this machine; {folder}/machine.json" in done.output
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> MachineReport:
    found: MachineReport = read_back(MachineReport, (folder / "machine.json").read_text())
    return found


def test_every_part_was_checked(report: MachineReport) -> None:
    names = [each.name for each in report.layouts]
    assert sum(name.startswith("collectives of ") for name in names) == 4
    axes = {axis for each in report.layouts if each.name.startswith(FAMILIES[0]) for axis in each.axes}
    assert {"tp", "sp", "pp", "cp", "dp", "ep"} <= axes | {"dp"}
    assert any(each.startswith(f"resuming {FAMILIES[0]} on tp1-pp2") for each in names)
    assert report.links is not None
    assert {(each.collective, each.assumed_s) for each in report.links.transfers} == {
        (name, None) for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv")
    }
    assert (report.left_out, report.diagnosis, report.config["models"]) == ({}, None, [FAMILIES[0]])


def test_the_page_and_the_json_name_no_place(folder: Path, report: MachineReport) -> None:
    page = read_html((folder / "machine.html").read_text())
    assert_is_self_contained(page)
    assert_is_accessible(page)
    text = (folder / "machine.json").read_text() + (folder / "machine.html").read_text()
    for place in (str(folder), os.getcwd(), socket.gethostname(), str(Path.home())):
        assert place not in text
    assert {"torch", "megatron-core", "gpu", "processors", "backend"} <= report.environment.keys()
    assert report.command == "mtrain verify machine --device cpu --ranks 2 --quick"
    assert report.times[0] in (folder / "machine.html").read_text()


def started(pool: Pool, num_ranks: int, **options: Any) -> MachineCheck:
    request = MachineRequest(device="cpu", ranks=num_ranks, quick=True, **options)
    return MachineCheck(request, num_ranks, CREATED, lambda line: None, pool)


@pytest.mark.parametrize(
    ("fault", "found"),
    [("dropped-element", "all_gather of float32 over world"), ("wrong-sum", "all_reduce of float32 over world")],
)
def test_a_wrong_collective_is_found_and_named(pool: Pool, fault: str, found: str) -> None:
    check = started(pool, 2, inject=fault)
    check.collectives([Layout(tp=2, sp=True), Layout(cp=2)])
    result, _ = check.results
    first = result.first_failure()
    assert first is not None
    assert first.name.startswith(found)
    assert check.diagnosis is not None
    assert "collectives fail on every layout" in check.diagnosis.lines[0]
    assert f"first deviation: share of wrong elements of {found} (rank 1, " in check.diagnosis.lines[1]
    wrong = {each.name.split(" ")[0] for each in result.deviations if not each.passed}
    assert wrong == {found.split(" ")[0]}
    assert {each.name.split(" over ")[1].split(" ")[0] for each in result.deviations if not each.passed} == {
        *("world", "tp", "tp_dp_cp", "expt_dp")
    }


def test_a_slow_link_is_shown_and_fails_nothing(pool: Pool) -> None:
    check = started(pool, 2, inject="slow-link")
    check.measure_links()
    assert check.results[0].passed
    assert check.links is not None
    # a message waits 0.3 s, of which a rank that leaves the barrier late does not see all
    slow = {(each.source, each.target) for each in check.links.pairs if each.seconds > 0.15}
    assert (0, 1) in slow
    from mtrain.verify.machine.links import link_lines

    assert any("slow link: a message from rank 0 to rank 1" in line for line in link_lines(check.links))


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_collectives_of_several_groups_and_odd_numbers_are_exact(pool: Pool, num_ranks: int) -> None:
    check = started(pool, num_ranks)
    layouts = list(collective_layouts(num_ranks))
    check.collectives(layouts[-2:])
    assert all(each.passed for each in check.results), [each.first_failure() or each.error for each in check.results]


def test_operands_are_exact_in_every_format_and_never_zero() -> None:
    drawn = [operand(rank, 4099) for rank in range(MAX_RANKS)]
    assert all(np.all(each != 0) for each in drawn)
    assert np.abs(drawn).sum(axis=0).max() <= 2**8, "bfloat16 holds all whole numbers up to 256"
    assert len({each.tobytes() for each in drawn}) == MAX_RANKS


def test_the_worst_rank_of_a_collective_is_reported() -> None:
    ranks = [{"all_reduce of int64 over tp": (0.0, 1)}, {"all_reduce of int64 over tp": (0.5, 1003)}]
    (found,) = collective_deviations(ranks)
    assert (found.value, found.name) == (0.5, "all_reduce of int64 over tp (rank 1, operands of 1003 elements)")


@pytest.mark.parametrize("error", [KeyError("planted"), DataError("planted"), AssertionError("planted")])
def test_a_part_that_ends_with_an_error_leaves_the_others(
    pool: Pool, error: Exception, monkeypatch: pytest.MonkeyPatch, report: MachineReport
) -> None:
    def raising(*given: Any) -> Any:
        raise error

    monkeypatch.setattr("mtrain.verify.machine.run.verify_parity", raising)
    check = started(pool, 2)
    check.parity(FAMILIES[0], family(FAMILIES[0], "cpu"))
    (failed,) = check.results
    assert failed.error is not None
    assert "planted" in failed.error
    whole = replace(report, layouts=(*report.layouts, failed))
    assert (whole.verdict, whole.exit_code) == ("UNFINISHED", 3 if isinstance(error, DataError) else 8)


KEY = "Kq83hf7Gs0aL2mZx91Pd"
SECRETS = {
    "path": "/data/user name/secret-project/corpus.idx",
    "home": "~/secret-project/x",
    "host": f"{socket.gethostname()}.example.internal",
    "address": "10.12.0.7:29500",
    "address of version 6": "fe80::1ff:fe23:4567:890a",
    "store": "tcp://gpu-17.example.internal:29500",
    "key": KEY,
    "short key": "abc-def",
}
AROUND = ("{}", "'{}'", "at {}: it failed", "({})", 'File "{}", line 3', "a={}, b", "[{}]\nmore")


@given(st.lists(st.tuples(st.sampled_from(sorted(SECRETS)), st.sampled_from(AROUND)), min_size=1, max_size=4))
def test_no_message_to_send_names_a_place(drawn: list[tuple[str, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRETS["short key"])
        # a name with a space ends at it unless it is quoted
        shown = [
            (SECRETS[name].replace(" ", "_") if "File" not in around and "'" not in around else SECRETS[name], around)
            for name, around in drawn
        ]
        text = redacted("; ".join(around.format(secret) for secret, around in shown))
    for word in ("secret-project", "user", "example", socket.gethostname(), "10.12", "fe23", KEY, "abc-def", "29500"):
        assert word not in text.replace("<user>", ""), text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('File "/opt/venv/lib/torch/nn.py", line 3', 'File "<path>/nn.py", line 3'),
        (
            "NCCL error in: /pytorch/torch/csrc/ProcessGroupNCCL.cpp:3690",
            "NCCL error in: <path>/ProcessGroupNCCL.cpp:3690",
        ),
        ("layout.tp=2 and/or 3 / 4 at 12.5 ms", "layout.tp=2 and/or 3 / 4 at 12.5 ms"),
        (
            "torch 2.13.0+cpu, c10::Error in nemotron3_nano_30b_a3b",
            "torch 2.13.0+cpu, c10::Error in nemotron3_nano_30b_a3b",
        ),
    ],
)
def test_what_helps_stays_in_a_message(text: str, left: str) -> None:
    assert redacted(text) == left


def test_a_report_of_a_failed_rank_names_no_place(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, report: MachineReport
) -> None:
    secret = " ".join(f"'{each}'" for each in SECRETS.values() if each != "abc-def")

    def raising(*given: Any) -> Any:
        raise RuntimeError(secret)

    monkeypatch.setattr("mtrain.verify.machine.run.verify_parity", raising)
    check = started(pool, 2)
    check.parity(FAMILIES[0], family(FAMILIES[0], "cpu"))
    whole = replace(report, layouts=tuple(check.results))
    for text in (whole.to_json(), report_page(whole)):
        assert "RuntimeError" in text
        assert not any(word in text for word in ("secret-project", "example.internal", "10.12.0.7", "fe23", KEY))
        assert os.getcwd() not in text
        assert "/tests/" not in text


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\tPXB\t0-47\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t0-47\nGPU2\tSYS\tSYS\t X \tPIX\t48-95\nNIC0\tPXB\tSYS\tPIX\t X \n\nLegend:\n"
)


def test_the_kinds_of_links_are_read() -> None:
    assert topology(TOPOLOGY, 3) == {
        "links of GPU0": "X NV18 SYS",
        "links of GPU1": "NV18 X SYS",
        "links of GPU2": "SYS SYS X",
    }
    assert topology("", 2) == {}


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_every_family_has_layouts_of_every_axis(num_ranks: int, pool: Pool) -> None:
    for name in FAMILIES:
        config = family(name, "cpu")
        check = MachineCheck(MachineRequest("cpu"), num_ranks, CREATED, lambda line: None, pool)
        fitting = list(check._fitting(name, config))
        wanted = {"tp2sp", "pp2", "dp2", "cp2allgather", *(["ep2dp2"] if config.model.experts else [])}
        assert wanted <= {*fitting}, (name, check.left_out)
        assert {*fitting} | {each.split(" on ")[1] for each in check.left_out} == {
            *layout_names(config.model, config.data, num_ranks, is_quick=False)
        }


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        (
            {"families": "qwen3_30b_a3b "},
            ConfigError,
            ("--families names 'qwen3_30b_a3b '", "did you mean qwen3_30b_a3b?"),
        ),
        ({"families": ""}, ConfigError, ("--families names ''", "choose from", "llama3_8b")),
        ({"inject": "dropped"}, ConfigError, ("--inject dropped",)),
        ({"device": "cuda"}, MachineError, ("needs a GPU",)),
    ],
)
def test_what_cannot_be_is_refused(
    pool: Pool, options: dict[str, Any], error: type[Exception], facts: tuple[str, ...]
) -> None:
    with refuses(error, *facts):
        verify_machine(MachineRequest(**{"device": "cpu", **options}), print, pool)


def test_ranks_of_a_launcher_say_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = []
    for rank in range(2):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        done = CliRunner().invoke(app, ["verify", "machine", "--output", str(tmp_path)])
        assert done.exit_code == 2
        said += [line for line in done.output.splitlines() if line]
    assert len(said) == 1
    assert "call it once" in said[0]


def test_a_folder_that_cannot_be_is_refused_before_the_first_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["verify", "machine", "--device", "cpu", "--output", str(tmp_path / "file")])
    assert done.exit_code == 7
    assert [line[:30] for line in done.output.splitlines()] == [f"error: could not write {tmp_path}"[:30]]


@pytest.mark.nightly
@pytest.mark.timeout(0)  # seven models on four ranks take as long as the machine is busy
def test_the_whole_check_passes(pool: Pool) -> None:
    report = verify_machine(MachineRequest("cpu", 4), lambda line: None, pool)
    assert report.passed, [(each.name, each.first_failure(), each.error) for each in report.layouts]
    assert len(report.layouts) > 80
