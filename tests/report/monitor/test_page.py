"""The report of a run: one continuous history over its starts, and how a real browser shows it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.base.heartbeat import Phase, heartbeat_file
from mtrain.report.metrics.record import StepRecord, TermRecord, ValidRecord
from mtrain.report.monitor.page import read_history, run_page, write_run_page
from mtrain.runs.events import EventKind
from tests.browser import Browser
from tests.cli.command_line import call
from tests.elements import Element, assert_is_accessible, assert_is_self_contained, read_html, rows
from tests.messages import refuses
from tests.paths import CONFIGS
from tests.report.metrics.records import step_record, valid_record, with_side_terms
from tests.report.monitor.folders import append, beats, started
from tests.verify.report.test_page import HOSTILE, LOWEST_CONTRAST, OVERFLOW, SMALLEST_PICTURE, WIDE_TABLES

LLAMA = "num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, vocab_size: 64"


@pytest.fixture(scope="module")
def requeued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a run that was killed after step 6, resumed after step 4, was stopped, and failed in its third start."""
    folder = tmp_path_factory.mktemp("requeued")
    log = started(folder, steps=4, num_steps=900)
    log.write(EventKind.SAVE, 4, facts={"seconds": 2.5})
    log.write(EventKind.START, 0, facts={"num_steps": 900, "world_size": 2, "layout": "tp1"})
    log.write(EventKind.RESUME, 4, facts={"reached": 6})
    append(folder, [replace(full(step), skipped="fp16 overflow" if step == 9 else None) for step in range(5, 800)])
    sets = {name: TermRecord(loss=loss, numerator=1, denominator=1) for name, loss in [("web", 2.5), ("code", 1.5)]}
    append(folder, [with_side_terms(replace(valid_record(step), valid_sets=sets)) for step in (100, 200, 300)])
    log.write(EventKind.ALARM, 700, "rank 1 is slow")
    log.write(EventKind.STOP, 799, "stopped by a signal after step 799")
    log.write(EventKind.START, 0, facts={"num_steps": 900, "world_size": 4, "layout": "tp2"})
    log.write(EventKind.RESUME, 799, facts={"reached": 799})
    log.write(EventKind.FAILURE, 799, "DataError: no file", {"exit_code": 3})
    beats(folder, 0)
    beats(folder, 1, memory_bytes=3 * 2**30)
    text = 'run: {dir: x, notes: "Does it help?\\n  It does.", tags: [llama, warm-up]}\n'
    text += (CONFIGS / "model" / "qwen3_8b.yaml").read_text() + "  hf: models/Qwen3-8B\n"
    text += "data: {kind: sft, seq_length: 4096, train: [{path: data/chat.jsonl}]}\ntrain: {global_batch_size: 64}\n"
    (folder / "config.yaml").write_text(text)
    environment = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "world_size": "4", "layout": "tp2-pp1-cp1-dp2"}
    (folder / "environment.json").write_text(json.dumps(environment))
    asked = [("Who are you?", 100), ({"messages": [{"role": "user", "content": "And why?"}]}, 200)]
    lines = [json.dumps({"step": step, "prompt": prompt, "answer": f"answer {step}"}) for prompt, step in asked]
    (folder / "samples.jsonl").write_text("\n".join([*lines, '{"step": 300, "pro']))
    return folder


def full(step: int) -> StepRecord:
    """Builds a step record with every field that can be recorded."""
    record = with_side_terms(step_record(step, 2 + 1 / step))
    assert isinstance(record, StepRecord)
    sources = {"web": TermRecord(loss=record.loss + 1, numerator=1, denominator=1)}
    return replace(
        record,
        sources=sources,
        padding_tokens=3,
        loss_tokens=900,
        mfu=0.4,
        memory_bytes=2**31,
        time_s=1e9,
        loss_scale=8.0,
    )


def page(run: Path) -> Element:
    return read_html(run_page(read_history(run, 2e9)))


@pytest.fixture(scope="module")
def written(requeued: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the page of that run."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_run_page(requeued, path)
    return path


@pytest.fixture(scope="module")
def read(written: Path) -> Element:
    """Parses that page."""
    return read_html(written.read_text())


def test_the_page_is_whole_self_contained_and_accessible(read: Element) -> None:
    assert_is_self_contained(read)
    assert_is_accessible(read)
    assert "FAILED" in read.all("h1")[0].text
    for shown in ("rank 0: DataError: no file", "Does it help?", "Tags: llama, warm-up."):
        assert shown in read.all("header")[0].text


def test_the_head_says_what_the_run_is(read: Element) -> None:
    head = read.all("dl")[0].text
    for shown in (
        "from models/Qwen3-8B; 36 layers of width 4,096, 151,936 tokens in the vocabulary",
        "qwen3, 8,190,735,360 parameters",
        "sft; chat.jsonl; 64 samples of up to 4,096 tokens a step",
        "4 x NVIDIA H100 80GB HBM3, tp2-pp1-cp1-dp2",
    ):
        assert shown in head, head


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("num_layers: 1", None),
        ("absent_key: 1", None),
        (f"{LLAMA}, logit_softcap: 7.0", "of no family of Hugging Face"),
    ],
)
def test_a_head_says_only_what_is_known(model: str, shown: str | None, tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "config.yaml").write_text(f"run: {{dir: x}}\nmodel: {{{model}}}\n")
    head = page(tmp_path).all("dl")[0].text
    assert ("parameters" in head) == (shown is not None)
    assert shown is None or shown in head


def test_all_pages_have_one_clock(requeued: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page shows the same times in every time zone, and names the zone once."""
    pages = []
    for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        pages.append(run_page(read_history(requeued, 2e9)))
    monkeypatch.undo()
    time.tzset()
    assert len(set(pages)) == 1
    assert read_html(pages[0]).all("main")[0].text.count("UTC") == 1
    assert "2001-09-09 01:46:40" in pages[0], "10^9 seconds"


def test_states_are_said_in_words(tmp_path: Path) -> None:
    started(tmp_path).write(EventKind.FINISH, 4)
    for rank, left_with in enumerate([None, "done", "RankLostError", "ValueError"]):
        beats(tmp_path, rank, phase=Phase.FORWARD_BACKWARD)
        path = heartbeat_file(tmp_path / "heartbeats", rank)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"left_with": left_with}))
    read = page(tmp_path)
    ranks, events, starts = (
        rows(next(each for each in read.all("table") if name in each.text))[1:]
        for name in ("heartbeat of each rank", "Events except saves", "Every start")
    )
    assert [row[4] for row in ranks] == [
        "still there",
        "finished its work",
        "lost another rank",
        "failed: ValueError",
    ]
    assert {row[1] for row in ranks} == {"forward and backward of step 5"}
    assert [row[:2] for row in events] == [["start", "2 ranks, tp2"], ["resume", ""], ["finish", ""]]
    assert [row[-1] for row in starts] == ["finished"]


def test_answers_are_listed(read: Element) -> None:
    table = next(each for each in read.all("table") if "Answers" in each.text)
    assert rows(table)[1:] == [["100", "Who are you?", "answer 100"], ["200", "And why?", "answer 200"]]


def test_a_damaged_answer_is_named(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n')
    with refuses(DataError, "samples.jsonl:1"):
        read_history(tmp_path, 0.0)


@pytest.mark.nightly  # by day a browser shows the page without complaints, below
def test_values_are_shown_under_the_pointer(tmp_path: Path, chromium: Browser) -> None:
    started(tmp_path, steps=0, num_steps=900)
    append(tmp_path, [step_record(step, 1000.5 + step) for step in range(1, 11)])
    write_run_page(tmp_path, tmp_path / "report.html")
    visit = chromium.open(tmp_path / "report.html", 390)
    chromium.evaluate("document.querySelector('[data-values]').scrollIntoView()")
    box = json.loads(
        chromium.evaluate("JSON.stringify(document.querySelector('[data-values]').getBoundingClientRect())")
    )
    # of 400 units of width the axis of steps 0 to 10 takes those from 58 to 386, with a fiftieth free on either side
    x = box["x"] + box["width"] * (58 + (386 - 58) * (0.02 * 10 + 4) / (10 * 1.04)) / 400
    place = {"type": "mouseMoved", "x": x, "y": box["y"] + box["height"] / 2}
    chromium.call("Input.dispatchMouseEvent", place)
    shown = chromium.evaluate("document.querySelector('.values').innerText")
    assert shown.splitlines()[:2] == ["step 4", "training: 1,004.5"]
    assert chromium.evaluate("document.querySelector('.values').getBoundingClientRect().right") <= 390
    chromium.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 1, "y": 1})
    assert chromium.evaluate("document.querySelector('.values').hidden") is True
    assert visit.complaints == []


def test_all_starts_are_one_history(read: Element) -> None:
    table = next(each for each in read.all("table") if "Every start" in each.text)
    killed, stopped, failed = rows(table)[1:]
    assert killed[2:] == ["0", "6", "0", "tp2", "2", "no end is recorded: it was killed"]
    assert stopped[2:] == ["4", "799", "2", "tp1", "2", "stopped by a signal after step 799"]
    assert failed[2:] == ["799", "799", "0", "tp2", "4", "failed: DataError: no file"]


def test_every_quantity_has_its_picture_with_a_mark_for_each_later_start(read: Element) -> None:
    figures = read.all("figure")
    assert [each.all("figcaption")[0].text for each in figures] == [
        "loss",
        "loss on web",
        "loss of kl",
        "learning rate",
        "gradient norm",
        "denominator",
        "denominator of kl",
        "denominator of z",
        "tokens of text",
        "tokens in the loss",
        "padding",
        "tokens/s",
        "mfu",
        "time",
        "memory",
        "loss scale",
    ]
    assert {len(each.all("g", "mark")) for each in figures} == {2}
    shown = {group.attributes["data-curve"] for group in figures[0].all("g", "curve")}
    assert shown == {"training", "validation: web", "validation: code"}


def test_a_single_validation_set_needs_no_name(tmp_path: Path) -> None:
    started(tmp_path)
    figure = page(tmp_path).all("figure")[0]
    assert {group.attributes["data-curve"] for group in figure.all("g", "curve")} == {"training", "validation"}
    assert figure.all("g", "mark") == []


def test_events_are_listed_but_for_saves(read: Element) -> None:
    table = next(each for each in read.all("table") if "Events except saves" in each.text)
    found = [(row[0], row[1], row[2]) for row in rows(table)[1:]]
    assert ("skipped step", "fp16 overflow", "9") in found
    assert ("alarm", "rank 1 is slow", "700") in found
    assert [kind for kind, *_ in found].count("start") == 3
    assert "save" not in [kind for kind, *_ in found]
    numbers = read.all("dl")[1].text
    for shown in (
        "3 over ",
        "2 steps repeated",
        "skipped steps1",
        "saves1, the slowest in 2.5 s",
        "3.0 GiB on one rank",
    ):
        assert shown in numbers


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    started(tmp_path, num_steps=6_000)
    append(tmp_path, [step_record(step, 9.0 if step == 3777 else 2.0) for step in range(5, 6_001)])
    text = run_page(read_history(tmp_path, 2e9))
    assert len(text) < 600_000


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {dir: x}\n")
    with refuses(DataError):
        read_history(tmp_path, 0.0)


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    started(run)
    for options, page_path in [
        ([], run / "report.html"),
        (["-o", tmp_path / "a" / "b.html"], tmp_path / "a/b.html"),
    ]:
        code, text = call("report", run, *options)
        assert (code, text.strip()) == (0, str(page_path))
        assert page_path.read_text().startswith("<!DOCTYPE html>")
    code, text = call("report", tmp_path / "nowhere")
    assert (code, text.count("\n")) == (3, 1)


def test_whatever_a_text_holds_stays_text(tmp_path: Path, chromium: Browser) -> None:
    log = started(tmp_path, name=HOSTILE)
    sets = {HOSTILE: TermRecord(loss=1.0, numerator=1.0, denominator=1.0)}
    hostile: ValidRecord = replace(valid_record(5), valid_sets=sets)
    append(tmp_path, [hostile])
    log.write(EventKind.FAILURE, 4, HOSTILE)
    write_run_page(tmp_path, tmp_path / "report.html")
    assert chromium.open(tmp_path / "report.html").complaints == []
    assert chromium.evaluate("typeof window.hit") == "undefined"
    assert HOSTILE in chromium.evaluate("document.querySelector('h1').textContent")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_a_browser_shows_the_page(written: Path, chromium: Browser, width: int, dark: bool) -> None:
    visit = chromium.open(written, width, dark=dark)
    assert visit.requests == [written.as_uri()]
    assert visit.complaints == []
    assert chromium.evaluate(OVERFLOW) == 0, "the page itself does not scroll sideways"
    assert chromium.evaluate(SMALLEST_PICTURE) > 60
    assert chromium.evaluate(LOWEST_CONTRAST) >= 4.5
    assert "Does it help?\n  It does." in chromium.evaluate("document.querySelector('header').innerText")
    assert width < 1280 or chromium.evaluate(WIDE_TABLES) == []
    pictures = [name for role, name in chromium.accessible() if role == "image"]
    assert "loss by step, from 1 to 799" in pictures
