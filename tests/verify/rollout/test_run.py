"""`mtrain verify rollout`: a healthy engine is said to be, and every planted cause is named."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtrain import Completion, DataError
from mtrain.arch.layout import Layout
from mtrain.cli.main import app
from mtrain.hf.configuration import load_config
from mtrain.verify.rollout.report import RolloutReport
from mtrain.verify.rollout.run import NOT_EXPLAINED, RolloutRequest, verify_rollout
from tests.config.yaml_files import write
from tests.messages import refuses
from tests.pool import Pool
from tests.verify.rollout import engine, rollout_ranks


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


class Engine:
    """Model in a folder, with answers to all questions."""

    def __init__(self, folder: Path, name: str, **changes: Any) -> None:
        self.folder = folder / "hf"
        self.model = engine.save_model(self.folder, name, **changes)
        self.prompts = [engine.prompt_ids(self.folder, messages) for messages in engine.QUESTIONS]
        self.answers = [engine.answer(self.model, prompt, seed) for seed, prompt in enumerate(self.prompts)]

    def copied(self, folder: Path) -> Engine:
        """Returns the same engine in a folder of its own, for a test that may change both."""
        found = copy.deepcopy(self)
        found.folder = shutil.copytree(self.folder, folder / "hf")
        return found

    def records(self, **changes: Any) -> list[dict[str, Any]]:
        """Returns healthy rollouts; `changes` are keys with a value for each."""
        found = [
            {"messages": messages, "prompt_token_ids": prompt, "token_ids": ids, "log_probs": log_probs}
            for messages, prompt, ids, log_probs in zip(
                engine.QUESTIONS, self.prompts, self.answers, self.log_probs(), strict=True
            )
        ]
        for number, record in enumerate(found):
            record.update({key: values[number] for key, values in changes.items()})
        return found

    def log_probs(self, prompts: list[list[int]] | None = None, **options: Any) -> list[list[float]]:
        pairs = zip(prompts or self.prompts, self.answers, strict=True)
        return [engine.log_probs(self.model, prompt, ids, **options) for prompt, ids in pairs]

    def verified(self, pool: Pool, records: list[dict[str, Any]], *overrides: str, **options: Any) -> RolloutReport:
        file = self.folder.parent / "rollouts.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        given = ["train.device=cpu", "train.precision=fp32", *overrides]
        return verify_rollout(RolloutRequest(self.folder, file, given, **options), print, pool)


def cause(report: RolloutReport) -> str:
    """Returns the only cause that is named."""
    (finding,) = report.findings
    return finding.cause


@pytest.fixture(scope="module")
def first_dense(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("dense"), "llama")


@pytest.fixture(scope="module")
def first_experts(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("experts"), "qwen3-moe", num_experts=8, num_experts_per_tok=3)


@pytest.fixture
def dense(first_dense: Engine, tmp_path: Path) -> Engine:
    return first_dense.copied(tmp_path)


@pytest.fixture
def experts(first_experts: Engine, tmp_path: Path) -> Engine:
    return first_experts.copied(tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_healthy_engine_is_said_to_be(pool: Pool, tmp_path: Path, name: str) -> None:
    found = Engine(tmp_path, name, num_key_value_heads=2)
    report = found.verified(pool, found.records(), "layout.tp=2", "layout.sp=true")
    assert report.passed
    assert [side.name for side in report.sides] == ["rollout", "trainer tp2sp-pp1-cp1-dp1-mbs1"]
    assert 0 < report.sides[0].spread.worst < 1e-5
    assert report.num_tokens == 48


def test_a_temperature_is_found(pool: Pool, dense: Engine) -> None:
    hot = dense.log_probs(change=lambda logits: logits / 0.7)
    report = dense.verified(pool, dense.records(log_probs=hot))
    assert cause(report) == "temperature"
    assert "temperature 0.7, but the file says 1" in report.findings[0].lines[0]
    assert dense.verified(pool, dense.records(log_probs=hot, temperature=[0.7] * 4)).passed


def test_log_probabilities_before_the_temperature_are_found(pool: Pool, dense: Engine) -> None:
    report = dense.verified(pool, dense.records(temperature=[0.7, 0.7, 1.3, 1.3]))
    assert cause(report) == "temperature"
    assert "temperature 1, but the file says 0.7, 1.3" in report.findings[0].lines[0]


def test_a_single_token_is_judged(pool: Pool, dense: Engine) -> None:
    """The rounding of one token may be small by chance, and says nothing then."""
    dense.answers = [ids[:1] for ids in dense.answers]
    hot = dense.log_probs(change=lambda logits: logits / 0.8)
    report = dense.verified(pool, dense.records(log_probs=hot)[:1])
    assert cause(report) == "temperature"
    assert "temperature 0.8, but the file says 1" in report.findings[0].lines[0]


@pytest.mark.parametrize("messages", [3, [3]], ids=["number", "list-of-numbers"])
def test_messages_that_are_none_are_refused(pool: Pool, dense: Engine, messages: object) -> None:
    records = dense.records()
    records[2]["messages"] = messages
    with refuses(DataError, "rollouts.jsonl line 3", "messages"):
        dense.verified(pool, records)


@pytest.mark.parametrize("by", [1, pytest.param(-1, marks=pytest.mark.nightly)])
def test_log_probabilities_of_the_neighbour_are_found(pool: Pool, dense: Engine, by: int) -> None:
    moved = [[*each[by:], *each[:by]] for each in dense.log_probs()]
    report = dense.verified(pool, dense.records(log_probs=moved))
    assert cause(report) == "off by one"
    tried = [name for name, *_ in report.tried]
    assert not any("at temperature 1, but the file says 1" in name for name in tried), tried


def test_logits_of_the_token_itself_are_found(pool: Pool, dense: Engine) -> None:
    late = []
    for prompt, ids in zip(dense.prompts, dense.answers, strict=True):
        with torch.no_grad():
            logits = dense.model(torch.tensor([prompt + ids])).logits[0, len(prompt) :]
        late.append(logits.log_softmax(-1)[range(len(ids)), ids].tolist())
    assert cause(dense.verified(pool, dense.records(log_probs=late))) == "off by one"


@pytest.mark.parametrize(
    ("change", "said"), [(engine.top_k(20), "top_k=20"), (engine.top_p(0.9), "top_p=0.9")], ids=["top-k", "top-p"]
)
def test_a_truncated_vocabulary_is_found(pool: Pool, dense: Engine, change: Any, said: str) -> None:
    for number, prompt in enumerate(dense.prompts):  # the tokens that are drawn are those that are left
        ids: list[int] = []
        generator = torch.Generator().manual_seed(number)
        while len(ids) < engine.NUM_TOKENS:
            with torch.no_grad():
                logits = change(dense.model(torch.tensor([prompt + ids])).logits[0, -1:])
            ids.append(int(torch.multinomial(logits[0].softmax(-1), 1, generator=generator)))
        dense.answers[number] = ids
    report = dense.verified(pool, dense.records(log_probs=dense.log_probs(change=change)))
    assert cause(report) == "truncated vocabulary"
    assert said in report.findings[0].lines[0]


def test_two_settings_of_a_sampler_are_named_together(pool: Pool, dense: Engine) -> None:
    def change(logits: torch.Tensor) -> torch.Tensor:
        return engine.top_k(50)(logits / 0.7)

    report = dense.verified(pool, dense.records(log_probs=dense.log_probs(change=change)))
    assert cause(report) == "temperature and truncated vocabulary"
    assert "temperature=0.7, top_k=50" in report.findings[0].lines[0]


def test_rows_in_another_order_are_found(pool: Pool, dense: Engine) -> None:
    own = dense.log_probs()
    report = dense.verified(pool, dense.records(log_probs=[own[3], *own[:3]]))
    assert cause(report) == "rows in another order"
    assert "line 1 has that of" in report.findings[0].lines[0]
    others = dense.log_probs([*dense.prompts[1:], dense.prompts[0]])
    report = dense.verified(pool, dense.records(log_probs=others))
    assert cause(report) == "rows in another order"
    assert "the prompt of another row" in report.findings[0].lines[0]


@pytest.mark.parametrize("is_end", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_prompt_that_the_engine_cut_is_found(pool: Pool, dense: Engine, is_end: bool) -> None:
    cut = dense.log_probs([prompt[-5:] if is_end else prompt[:5] for prompt in dense.prompts])
    report = dense.verified(pool, dense.records(log_probs=cut))
    assert cause(report) == "cut prompt"
    assert f"the {'last' if is_end else 'first'} 5 tokens" in report.findings[0].lines[0]


def test_rows_that_stand_twice_are_said(pool: Pool, dense: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    records = dense.records()
    assert dense.verified(pool, [*records, records[1]]).passed
    said = capsys.readouterr().out
    assert "rollouts.jsonl line 2, " in said
    assert "rollouts.jsonl line 5" in said


def test_an_engine_in_bfloat16_is_found(pool: Pool, dense: Engine) -> None:
    dense.answers = [ids[:7] for ids in dense.answers]  # too few tokens for pairs of settings, which find nothing here
    dense.model.bfloat16()
    records = dense.records()[:1]
    dense.model.float()
    report = dense.verified(pool, records)
    assert cause(report) == "precision"
    assert "--dtype bfloat16" in report.findings[0].lines[1]
    assert dense.verified(pool, records, dtype="bfloat16").passed


def test_token_ids_need_no_tokenizer(pool: Pool, dense: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    records = dense.records()
    for each in dense.folder.glob("*token*"):
        each.unlink()
    (dense.folder / "chat_template.jinja").unlink()
    with refuses(DataError, "tokenizer"):
        dense.verified(pool, records)
    assert dense.verified(pool, [{k: each[k] for k in each if k != "messages"} for each in records]).passed
    assert "not compared with a tokenizer" in capsys.readouterr().out


def test_rows_that_pad_the_vocabulary_are_found(pool: Pool, dense: Engine) -> None:
    padded = dense.log_probs(change=lambda logits: torch.nn.functional.pad(logits, (0, 7)))
    report = dense.verified(pool, dense.records(log_probs=padded))
    assert cause(report) == "padded vocabulary"
    assert "7 rows" in report.findings[0].lines[0]


def test_a_missing_bos_is_found_in_the_ids(pool: Pool, dense: Engine) -> None:
    bare = [prompt[1:] for prompt in dense.prompts]
    report = dense.verified(pool, dense.records(prompt_token_ids=bare, log_probs=dense.log_probs(bare)))
    assert cause(report) == "missing bos"
    assert report.sides[0].passed  # of these ids the engine says what the reference says


def test_a_template_without_bos_misses_none(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TEMPLATE", engine.TEMPLATE.replace("{{ bos_token }}", ""))
    found = Engine(tmp_path, "llama")
    records = [{key: value for key, value in each.items() if key != "messages"} for each in found.records()]
    assert records[0]["prompt_token_ids"][0] != 1
    assert found.verified(pool, records).passed


def test_a_missing_bos_is_found_in_the_log_probabilities(pool: Pool, dense: Engine) -> None:
    bare = dense.log_probs([prompt[1:] for prompt in dense.prompts])
    assert cause(dense.verified(pool, dense.records(log_probs=bare))) == "missing bos"


def test_a_doubled_bos_is_found(pool: Pool, dense: Engine) -> None:
    twice = dense.log_probs([[1, *prompt] for prompt in dense.prompts])
    assert cause(dense.verified(pool, dense.records(log_probs=twice))) == "doubled bos"


def test_another_template_is_found_in_the_ids(pool: Pool, dense: Engine) -> None:
    other = [[*prompt[:-1], engine.WORDS.index("w9"), prompt[-1]] for prompt in dense.prompts]
    report = dense.verified(pool, dense.records(prompt_token_ids=other, log_probs=dense.log_probs(other)))
    assert cause(report) == "other template"
    assert "'w9 assistant' instead of 'assistant'" in report.findings[0].lines[0]


def test_another_template_is_found_in_the_log_probabilities(pool: Pool, dense: Engine) -> None:
    alone = [engine.prompt_ids(dense.folder, messages[1:]) for messages in engine.QUESTIONS]
    report = dense.verified(pool, dense.records(log_probs=dense.log_probs(alone)))
    assert cause(report) == "other template"
    assert "without those of the system" in report.findings[0].lines[0]


@pytest.mark.parametrize("is_named", [True, pytest.param(False, marks=pytest.mark.nightly)])  # as two causes, below
def test_stale_weights_are_found_where_they_are_named(pool: Pool, dense: Engine, is_named: bool) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for each in dense.model.parameters():
            each.add_(torch.randn(each.shape) * 1e-2)  # more than the rounding of an engine in bfloat16
    old = dense.folder.parent / "old"
    dense.model.save_pretrained(old)
    records = dense.records(log_probs=dense.log_probs())
    report = dense.verified(pool, records, weights=[old] if is_named else [])
    assert cause(report) == ("stale weights" if is_named else NOT_EXPLAINED)
    assert (str(old) in report.findings[0].lines[0]) == is_named


def test_bfloat16_routers_are_found(pool: Pool, experts: Engine) -> None:
    with engine.bfloat16_routers(experts.model):
        found = experts.log_probs()
    assert cause(experts.verified(pool, experts.records(log_probs=found))) == "bf16 router"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_another_expert_parallel_sum_is_found(pool: Pool, experts: Engine, num_ranks: int) -> None:
    with engine.expert_sums(experts.model, num_ranks):
        found = experts.log_probs()
    report = experts.verified(pool, experts.records(log_probs=found))
    assert cause(report) == "expert-parallel sum"
    assert f"each of {num_ranks} expert-parallel ranks" in report.findings[0].lines[0]


def test_two_causes_at_once_are_not_taken_for_one(pool: Pool, experts: Engine) -> None:
    with engine.bfloat16_routers(experts.model):
        both = experts.log_probs(change=lambda logits: logits / 0.8)
    assert cause(experts.verified(pool, experts.records(log_probs=both))) == NOT_EXPLAINED


@pytest.mark.nightly  # every pair of settings is tried, for seconds: by day once, above
def test_other_deviations_without_a_single_cause_are_not_explained(pool: Pool, experts: Engine) -> None:
    both = experts.log_probs([prompt[1:] for prompt in experts.prompts], change=lambda logits: logits / 0.8)
    assert cause(experts.verified(pool, experts.records(log_probs=both))) == NOT_EXPLAINED
    with engine.forced_routes(experts.model):
        forced = experts.log_probs()
    assert cause(experts.verified(pool, experts.records(log_probs=forced))) == NOT_EXPLAINED, "no routes in the file"


def test_a_cause_in_some_rollouts_is_found_there(pool: Pool, dense: Engine) -> None:
    records = dense.records()
    records[2]["log_probs"] = dense.log_probs(change=lambda logits: logits / 1.5)[2]
    report = dense.verified(pool, records)
    assert cause(report) == "temperature"
    assert "in 1 of 4 rollouts" in report.findings[0].lines[0]


def test_a_conversation_is_compared_with_its_mask(pool: Pool, dense: Engine) -> None:
    records = dense.records()[:1]
    said = " ".join(engine.WORDS[token] for token in records[0]["token_ids"])
    answered = [*engine.QUESTIONS[0], {"role": "assistant", "content": said}]
    records[0]["messages"] = answered
    assert dense.verified(pool, records).passed
    records[0]["mask"] = [0, 0, *[1] * (engine.NUM_TOKENS - 2)]
    report = dense.verified(pool, records)
    assert cause(report) == "other mask"
    assert f"token {len(dense.prompts[0])} of the conversation counts as not drawn" in report.findings[0].lines[0]


def test_tokens_beyond_the_vocabulary_end_the_check(pool: Pool, dense: Engine) -> None:
    records = dense.records()
    records[1]["token_ids"] = [*records[1]["token_ids"][:-1], len(engine.WORDS)]
    report = dense.verified(pool, records)
    assert cause(report) == "other vocabulary"
    assert report.sides == ()


def test_the_first_layer_that_deviates_is_named(pool: Pool, dense: Engine) -> None:
    with torch.no_grad():
        read = [prompt + ids[:-1] for prompt, ids in zip(dense.prompts, dense.answers, strict=True)]
        states = [dense.model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in read]
    names = ["embedding", "layer 0", "layer 1", "final_layernorm"]  # transformers gives the last layer after its norm
    given = [{name: each[0].tolist() for name, each in zip(names, of, strict=True)} for of in states]
    report = dense.verified(pool, dense.records(hidden_states=given))
    assert list(report.layers) == names
    assert max(report.layers.values()) < 4
    for each in given:
        each["layer 1"] = [[1.001 * value for value in row] for row in each["layer 1"]]
    report = dense.verified(pool, dense.records(hidden_states=given))
    assert [name for name, excess in report.layers.items() if excess > 4] == ["layer 1"]
    assert "layer 1 is the first that deviates" in report.findings[0].lines[0]


def routes_of(experts: Engine, recorded: list[torch.Tensor]) -> list[Any]:
    """Returns the choices of a forward pass over each answer, [tokens, layers, k]."""
    found = []
    for prompt, ids in zip(experts.prompts, experts.answers, strict=True):
        recorded.clear()
        with torch.no_grad():
            experts.model(torch.tensor([prompt + ids[:-1]]))
        found.append(torch.stack(recorded, 1).tolist())
    return found


def test_routes_of_the_engine_are_compared_and_replayed(pool: Pool, experts: Engine) -> None:
    """The trainer replays them under its layout, and is as near to the engine then as rounding lets it."""
    with engine.recorded_routes(experts.model) as own:
        routes = routes_of(experts, own)
    report = experts.verified(pool, experts.records(routed_experts=routes), "layout.ep=2")
    assert report.passed
    count = sum(len(each) for each in routes) * 3
    assert report.routes == f"{count} of {count} choices of experts are those of float64"
    with engine.forced_routes(experts.model) as own:
        forced, routes = experts.log_probs(), routes_of(experts, own)
    report = experts.verified(pool, experts.records(log_probs=forced, routed_experts=routes), "layout.ep=2")
    assert cause(report) == "other routes"
    trainer = "trainer tp1-pp1-cp1-dp2-ep2etp1-mbs1"
    assert [(side.name, side.passed) for side in report.sides] == [
        ("rollout", False), (trainer, True), (f"{trainer}, routes replayed", True)
    ]  # fmt: skip
    assert report.replay is not None
    without, replayed = (float(each) for each in re.findall(r"worst (\S+),", report.replay))
    assert without > 0.01
    assert replayed < 1e-5


def test_routes_of_some_rollouts_are_not_replayed(
    pool: Pool, experts: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine.recorded_routes(experts.model) as own:
        routes = routes_of(experts, own)
    report = experts.verified(pool, experts.records(routed_experts=[None, *routes[1:]]))
    assert report.passed
    assert report.replay is None
    count = len(routes)
    assert f"routes are not replayed: {count - 1} of {count} rollouts have them" in capsys.readouterr().out


def test_our_sampler_is_healthy_and_the_step_before_is_stale(pool: Pool, dense: Engine) -> None:
    sections = {
        "run": {"dir": str(dense.folder.parent / "run")},
        "model": {"hf": str(dense.folder)},
        "train": {"global_batch_size": 4, "num_steps": 2, "precision": "fp32", "device": "cpu"},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "data": {"kind": "mock", "seq_length": 32},
    }
    run = load_config([write(dense.folder.parent / "run.yaml", sections)])
    (before, after), *_ = Pool().run(rollout_ranks.drawn_around_a_step, Layout(), run, dense.prompts)

    def verified(completions: list[Completion]) -> RolloutReport:
        file = dense.folder.parent / "drawn.jsonl"
        drawn = [
            {"prompt_token_ids": prompt, **asdict(each)}
            for prompt, each in zip(dense.prompts, completions, strict=True)
        ]
        file.write_text("".join(json.dumps(each) + "\n" for each in drawn))
        return verify_rollout(RolloutRequest(dense.folder.parent / "run", file), print, pool)

    assert verified(after).passed
    report = verified(before)
    assert cause(report) == "stale weights"
    assert "those of step 0, but the model is that of step 1" in report.findings[0].lines[0]


@pytest.mark.parametrize("has_routes", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_trainer_that_adds_up_experts_otherwise_is_to_blame(pool: Pool, experts: Engine, has_routes: bool) -> None:
    """The sum is named with the rollout's routes in the file, too: to replay them does not explain it."""
    with engine.recorded_routes(experts.model) as own:
        routes = routes_of(experts, own)
    faulty: Any = rollout_ranks.Faulty(
        pool, rollout_ranks.scores_with_rounded_experts, lambda layout, *_: layout.ep > 1
    )
    report = experts.verified(
        faulty, experts.records(**({"routed_experts": routes} if has_routes else {})), "layout.ep=2"
    )
    assert cause(report) == "expert-parallel sum"
    assert [side.passed for side in report.sides] == [True, False, True, *([False] if has_routes else [])]
    assert "the trainer under tp1-pp1-cp1-dp2-ep2etp1-mbs1 deviates" in report.findings[0].lines[0]


def test_a_trainer_that_chooses_other_experts_is_to_blame(pool: Pool, experts: Engine) -> None:
    faulty: Any = rollout_ranks.Faulty(pool, rollout_ranks.scores_with_other_experts, lambda *_: True)
    report = experts.verified(faulty, experts.records(), "layout.ep=2")
    assert cause(report) == "other routes"
    assert [side.passed for side in report.sides] == [True, False, True]
    said = report.findings[0].lines[0]
    assert "the trainer under tp1-pp1-cp1-dp2-ep2etp1-mbs1 chose other experts than float64 (0 of " in said


def test_a_trainer_that_does_not_replay_is_found(pool: Pool, experts: Engine) -> None:
    with engine.forced_routes(experts.model) as own:
        forced, routes = experts.log_probs(), routes_of(experts, own)
    faulty: Any = rollout_ranks.Faulty(pool, rollout_ranks.scores_without_replay, lambda *_: True)
    report = experts.verified(faulty, experts.records(log_probs=forced, routed_experts=routes))
    assert [each.cause for each in report.findings] == ["other routes", "routing replay"]
    assert [side.passed for side in report.sides] == [False, True, False]


def command(dense: Engine, records: list[dict[str, Any]]) -> tuple[Any, Path]:
    file, folder = dense.folder.parent / "rollouts.jsonl", dense.folder.parent / "report"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["verify", "rollout", str(dense.folder), "--rollouts", str(file), "--output", str(folder)]
    return CliRunner().invoke(app, [*arguments, "train.device=cpu", "train.precision=fp32"]), folder


def test_the_command_writes_a_page(dense: Engine) -> None:
    wrong, folder = command(dense, dense.records(log_probs=dense.log_probs(change=lambda logits: logits / 0.5)))
    assert wrong.exit_code == 1, wrong.output
    assert "temperature: in 4 of 4 rollouts" in wrong.output
    page = (folder / "rollout.html").read_text()
    assert "Causes that were tried" in page
    assert json.loads((folder / "rollout.json").read_text())["findings"][0]["cause"] == "temperature"
    bad, _ = command(dense, [{}])
    assert bad.exit_code == 3
    assert "rollouts.jsonl line 1" in bad.output


@pytest.mark.nightly  # ranks start anew for a command; the day has its page and its other exit codes
def test_the_command_says_that_all_agree(dense: Engine) -> None:
    good, folder = command(dense, dense.records())
    assert good.exit_code == 0, good.output
    assert "PASS: 4 rollouts, 48 tokens" in good.output
    assert "Engine and trainer compute what the weights say" in (folder / "rollout.html").read_text()
