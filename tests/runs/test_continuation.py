"""What a run keeps of its earlier start, and what it refuses to change."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mtrain.arch.lr import learning_rate
from mtrain.base.errors import RunFolderError
from mtrain.config import Config
from mtrain.config.changes import Change
from mtrain.config.load import config_yaml
from mtrain.config.schema.data import SftSection
from mtrain.runs.continuation import allowed_changes, continued, kept_lines
from tests.config.samples import config
from tests.fault_table import Notice
from tests.messages import refuses

FOLDER = Path("runs/first")

OF_ANY_KIND: dict[str, Any] = {
    "train": [],
    "valid": [],
    "test": [],
    "split": None,
    "tokenizer": None,
    "isolate_documents": False,
    "too_long": "truncate",
}
"""Keys of the one section for all kinds of data that 0.1.0 had, all of which it wrote."""


def of_old_version(**changes: Any) -> str:
    """Returns the resolved configuration as the program wrote it before it had today's keys."""
    sections = yaml.safe_load(config_yaml(config(**changes)))
    del sections["optimizer"]["schedule_convention"], sections["optimizer"]["kind"]
    for later in ("format", "chat_template", "chat_date", "loss_on", "special_tokens_in_text", "ignore_keys"):
        sections["data"].pop(later, None)
    sections["data"] = OF_ANY_KIND | sections["data"]
    return yaml.safe_dump(sections)


def test_a_run_of_an_old_version_keeps_its_learning_rates_and_says_so() -> None:
    given = config(optimizer__warmup_steps=2)
    kept = continued(given, of_old_version(optimizer__warmup_steps=2), FOLDER, 3)
    assert kept.optimizer.schedule_convention == "one_ahead"
    assert learning_rate(3, kept.optimizer, 10) == learning_rate(4, given.optimizer, 10)
    assert list(kept_lines(given, kept)) == [
        "optimizer.schedule_convention=one_ahead stays, since this run began with it"
    ]


def test_a_finetuning_of_an_old_version_keeps_its_form_of_chat_and_says_so() -> None:
    data = {"kind": "sft", "seq_length": 64, "tokenizer": "x.model", "train": [{"path": "x.jsonl"}]}
    kept = continued(config(data=data), of_old_version(data=data), FOLDER, 3)
    assert isinstance(kept.data, SftSection)
    assert kept.data.chat_template == "plain"
    assert "data.chat_template=plain stays, since this run began with it" in kept_lines(config(data=data), kept)
    unchanged = continued(config(data=data), config_yaml(config(data=data)), FOLDER, 3).data
    assert isinstance(unchanged, SftSection)
    assert unchanged.chat_template == "auto"
    named = config(data={**data, "ignore_keys": ["id"]})
    given = continued(named, of_old_version(data=data), FOLDER, 3).data
    assert isinstance(given, SftSection)
    assert given.ignore_keys == ("id",)


@pytest.mark.parametrize("asked", [{}, {"targets": "all-linear"}], ids=["unset", "all-linear"])
def test_a_finetuning_of_an_old_version_keeps_its_targets_and_says_so(asked: dict[str, Any]) -> None:
    """all-linear was [qkv, proj, fc1, fc2] on every model once."""
    old = ["qkv", "proj", "fc1", "fc2"]
    hybrid = {"model__delta_net": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}}
    given = config(adapter=asked, **hybrid)
    kept = continued(given, config_yaml(config(adapter={"targets": old}, **hybrid)), FOLDER, 3)
    assert given.adapter is not None
    assert kept.adapter is not None
    assert given.adapter.targets == ("qkv", "proj", "in_proj", "out_proj", "fc1", "fc2")
    assert kept.adapter.targets == tuple(old)
    assert list(kept_lines(given, kept)) == ["adapter.targets=qkv, proj, fc1, fc2 stays, since this run began with it"]
    assert continued(given, config_yaml(given), FOLDER, 3) == given, "a new run goes on with its own"
    with refuses(RunFolderError, "adapter.targets"):
        named = config(adapter={"targets": ["qkv", "in_proj"]}, **hybrid)
        continued(named, config_yaml(config(adapter={"targets": old}, **hybrid)), FOLDER, 3)
    assert continued(config(), config_yaml(config()), FOLDER, 3).adapter is None


def test_a_run_of_windows_across_epochs_keeps_its_order_and_says_so() -> None:
    """An earlier program let windows reach over the ends of epochs, and had no key for it."""
    data = {"kind": "mock", "seq_length": 64, "isolate_documents": True}
    by_rows, by_samples = {**data, "packing": {"batch": "rows"}}, {**data, "packing": {"batch": "sequences"}}

    def before(data: dict[str, Any]) -> str:
        sections = yaml.safe_load(config_yaml(config(data=data)))
        sections["data"]["packing"].pop("across_epochs")
        return yaml.safe_dump(sections)

    given = config(data=by_rows)
    kept = continued(given, before(by_rows), FOLDER, 3)
    assert kept.data.packing is not None
    assert kept.data.packing.across_epochs
    assert list(kept_lines(given, kept)) == ["data.packing.across_epochs=true stays, since this run began with it"]
    assert continued(given, config_yaml(kept), FOLDER, 6) == kept, "at every later start"
    assert continued(given, config_yaml(given), FOLDER, 3) == given, "a new run goes on with its own"
    assert continued(given, before(by_samples), FOLDER, 3) == given, "it had no windows"
    assert continued(config(data=data), before(by_rows), FOLDER, 3) == config(data=data)
    named = config(data={**data, "packing": {"batch": "rows", "across_epochs": False}})
    assert continued(named, before(by_rows), FOLDER, 3) == named, "what its data are called is refused then"


def test_a_moved_template_or_teacher_is_known_by_what_it_holds() -> None:
    data = {"kind": "sft", "seq_length": 64, "tokenizer": "x.model", "train": [{"path": "x.jsonl"}]}

    def of_template(choice: str) -> Config:
        return config(data={**data, "chat_template": choice})

    here, there = of_template("here/a.jinja"), of_template("there/b.jinja")
    assert continued(there, config_yaml(here), FOLDER, 3) == there
    for other in ("plain", "auto", "tool_use"):
        with refuses(RunFolderError, "data.chat_template"):
            continued(of_template(other), config_yaml(here), FOLDER, 3)

    def of_teacher(path: str | None) -> Config:
        return config(loss__teacher=None if path is None else {"checkpoint": path})

    saved = config_yaml(of_teacher("here"))
    assert allowed_changes(of_teacher("there"), saved, FOLDER, 3) == []
    with refuses(RunFolderError, "loss.teacher.checkpoint"):
        allowed_changes(of_teacher("there"), saved, FOLDER, 3, teacher_is_known=False)
    with refuses(RunFolderError, "loss.teacher"):
        allowed_changes(of_teacher(None), saved, FOLDER, 3)


def test_it_keeps_them_at_every_later_start() -> None:
    first = continued(config(), of_old_version(), FOLDER, 3)
    second = continued(config(), config_yaml(first), FOLDER, 6)
    assert second == first
    assert continued(second, config_yaml(first), FOLDER, 6) == first, "from its own config.yaml"


def test_a_new_run_begins_and_goes_on_as_megatron_counts() -> None:
    kept = continued(config(), config_yaml(config()), FOLDER, 3)
    assert kept.optimizer.schedule_convention == "megatron"
    assert list(kept_lines(config(), kept)) == []


@pytest.mark.fault(
    "input",
    "another optimizer.schedule_convention asked of a run that goes on",
    happens="refused: the key has another value in this run",
    exit_code=6,
)
def test_a_named_convention_does_not_turn_a_run_around(notice: Notice) -> None:
    wanted = config(optimizer__schedule_convention="megatron")
    with notice, refuses(RunFolderError, "optimizer.schedule_convention") as caught:
        continued(wanted, of_old_version(), FOLDER, 3)
    assert caught.value.exit_code == notice.exit_code


def test_keys_of_named_sections_that_an_old_version_did_not_have_stand_at_their_default() -> None:
    given = config(loss__side_terms={"z": {"function": "z_loss", "coefficient": 0.5}})
    old = yaml.safe_load(config_yaml(given))
    del old["loss"]["side_terms"]["z"]["empty_sequences"]
    assert continued(given, yaml.safe_dump(old), FOLDER, 3) == given
    del old["loss"]["side_terms"]["z"]["coefficient"]
    with refuses(RunFolderError, "loss.side_terms.z.coefficient"):
        continued(given, yaml.safe_dump(old), FOLDER, 3)


def test_keys_of_other_kinds_of_data_said_nothing_in_an_old_version() -> None:
    saved = yaml.safe_load(of_old_version())
    saved["data"] |= {"train": [{"path": "x"}], "too_long": "drop", "split": [0.9, 0.1, 0.0]}
    assert continued(config(), yaml.safe_dump(saved), FOLDER, 3).data == config().data


def test_keys_that_an_old_version_did_not_have_stand_at_their_default() -> None:
    old = yaml.safe_load(config_yaml(config()))
    del old["model"]["qk_norm"], old["optimizer"]["decay_norms_and_biases"], old["data"]["prefetch_steps"]
    del old["optimizer"]["kind"]  # 0.1.0 had AdamW only
    assert continued(config(), yaml.safe_dump(old), FOLDER, 3) == config()
    with refuses(RunFolderError, "model.qk_norm"):
        continued(config(model__qk_norm=True), yaml.safe_dump(old), FOLDER, 3)
    del old["model"]["num_layers"]
    with refuses(RunFolderError, "model.num_layers"):
        continued(config(), yaml.safe_dump(old), FOLDER, 3)


DECAYS = [("cosine", 10), ("linear", 10), ("wsd", 1)]


@pytest.mark.fault(
    "input",
    "train.num_steps changed where the decay of the learning rate follows from it",
    happens="refused, with the optimizer.decay_steps that keeps the schedule",
    exit_code=6,
)
@pytest.mark.parametrize(("schedule", "decay"), DECAYS)
@pytest.mark.parametrize("num_steps", [8, 20])
def test_another_length_does_not_rewrite_the_schedule(
    schedule: str, decay: int, num_steps: int, notice: Notice
) -> None:
    saved = config_yaml(config(optimizer__schedule=schedule))
    longer = config(optimizer__schedule=schedule, train__num_steps=num_steps)
    with notice, refuses(RunFolderError, f"train.num_steps={num_steps}", f"optimizer.decay_steps={decay}") as caught:
        continued(longer, saved, FOLDER, 3)
    assert caught.value.exit_code == notice.exit_code


@pytest.mark.parametrize(("schedule", "decay"), DECAYS)
def test_the_decay_that_the_message_names_keeps_the_rates_so_far(schedule: str, decay: int) -> None:
    before = config(optimizer__schedule=schedule)
    longer = config(optimizer__schedule=schedule, train__num_steps=20, optimizer__decay_steps=decay)
    kept = continued(longer, config_yaml(before), FOLDER, 9)
    assert kept == longer
    rates = [
        [learning_rate(step, each.optimizer, each.train.num_steps) for step in range(9)] for each in (before, kept)
    ]
    assert rates[0] == rates[1]
    assert continued(longer, config_yaml(kept), FOLDER, 12) == longer
    with refuses(RunFolderError, "train.num_steps=30", f"optimizer.decay_steps={decay}"):
        continued(config(optimizer__schedule=schedule, train__num_steps=30), config_yaml(kept), FOLDER, 12)


def test_a_constant_rate_takes_any_length() -> None:
    longer = config(optimizer__schedule="constant", train__num_steps=20)
    assert continued(longer, config_yaml(config(optimizer__schedule="constant")), FOLDER, 10) == longer


def test_another_decay_is_another_run() -> None:
    with refuses(RunFolderError, "optimizer.decay_steps"):
        continued(config(optimizer__decay_steps=5), config_yaml(config()), FOLDER, 3)


@pytest.mark.fault(
    "input",
    "a wsd run made longer or shorter after its final decay began",
    happens="refused: updates that were made would have had another learning rate",
    exit_code=6,
)
@pytest.mark.parametrize("num_steps", [9, 20])
def test_a_final_decay_that_has_begun_is_not_moved(num_steps: int, notice: Notice) -> None:
    keys = {"optimizer__schedule": "wsd", "optimizer__decay_steps": 4}
    saved, moved = config_yaml(config(**keys)), config(**keys, train__num_steps=num_steps)
    assert continued(moved, saved, FOLDER, 6) == moved, "still stable in both"
    with notice, refuses(RunFolderError, "step 8") as caught:
        continued(moved, saved, FOLDER, 8)
    assert caught.value.exit_code == notice.exit_code


def test_a_damaged_count_is_named() -> None:
    saved = config_yaml(config()).replace("num_steps: 10", "num_steps: ten")
    with refuses(RunFolderError, "runs/first", "train.num_steps='ten'"):
        continued(config(), saved, FOLDER, 3)


def allowing(*keys: str, **changes: Any) -> Config:
    return config(checkpoint__allow_changed=list(keys), **changes)


def test_what_was_allowed_changes_and_is_named_with_both_values() -> None:
    saved = config_yaml(config())
    given = allowing("optimizer.lr", "loss", optimizer__lr=2e-3, loss__aggregation="sum")
    assert continued(given, saved, FOLDER, 3) == given
    assert allowed_changes(given, saved, FOLDER, 3) == [
        Change("loss.aggregation", '"token-mean"', '"sum"', is_neutral=False),
        Change("optimizer.lr", "0.001", "0.002", is_neutral=False),
    ]
    assert allowed_changes(allowing("optimizer.lr"), saved, FOLDER, 3) == [], "nothing has changed"


@pytest.mark.fault(
    "input",
    "a run goes on with other values than those that checkpoint.allow_changed names",
    happens="refused; names those keys alone, and which of them no run can change",
    exit_code=6,
)
def test_consent_to_one_key_is_none_to_another(notice: Notice) -> None:
    given = allowing("optimizer.lr", optimizer__lr=2e-3, optimizer__clip_grad=2.0, train__seed=5)
    with notice, refuses(RunFolderError, "optimizer.clip_grad, train.seed") as caught:
        continued(given, config_yaml(config()), FOLDER, 3)
    assert caught.value.exit_code == notice.exit_code


@pytest.mark.parametrize(("schedule", "decay"), DECAYS)
def test_a_schedule_is_rewritten_with_consent_only(schedule: str, decay: int) -> None:
    saved = config_yaml(config(optimizer__schedule=schedule))
    given = allowing("optimizer.decay_steps", optimizer__schedule=schedule, train__num_steps=30)
    new = 30 if decay == 10 else 3
    assert allowed_changes(given, saved, FOLDER, 3) == [
        Change("optimizer.decay_steps", str(decay), str(new), is_neutral=False),
        Change("train.num_steps", "10", "30", is_neutral=False),
    ]
    with refuses(RunFolderError, "checkpoint.allow_changed=[optimizer.decay_steps]"):
        allowed_changes(allowing("optimizer.lr", optimizer__schedule=schedule, train__num_steps=30), saved, FOLDER, 3)


def test_consent_to_another_schedule_is_one_to_its_decay() -> None:
    saved = config_yaml(config(optimizer__schedule="constant"))
    given = allowing("optimizer.schedule", optimizer__schedule="cosine", train__num_steps=30)
    assert [each.key for each in allowed_changes(given, saved, FOLDER, 3)] == ["optimizer.schedule"]


def of_files(path: str, weight: float = 1.0, **keys: Any) -> dict[str, Any]:
    return {"kind": "indexed", "seq_length": 64, "train": [{"path": path, "weight": weight}], **keys}


def test_data_are_known_by_what_they_are_and_not_by_where_they_lie() -> None:
    saved = config_yaml(config(data=of_files("old/corpus", tokenizer="old.model", valid=[{"path": "old/valid"}])))
    moved = config(data=of_files("new/place", tokenizer="new.model"))
    assert continued(moved, saved, FOLDER, 3) == moved
    with refuses(RunFolderError, "data.train"):
        continued(config(data=of_files("new/place", weight=2.0)), saved, FOLDER, 3)
    blended = of_files("old/corpus", train=[{"path": "old/corpus"}, {"path": "more"}])
    with refuses(RunFolderError, "data.train"):
        continued(config(data=blended), saved, FOLDER, 3)
