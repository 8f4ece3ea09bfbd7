"""Rules for continuing a run: values that it keeps from its earlier start, and values that must not change."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import PydanticUndefined

from mtrain.arch.lr import decay_steps, learning_rate
from mtrain.base.errors import RunFolderError
from mtrain.config import Config
from mtrain.config.changes import Change, changes, flat_keys
from mtrain.config.consent import is_permitted
from mtrain.config.kinds import sections_at
from mtrain.config.schema.data import SourceSection, is_path_of_template
from mtrain.config.schema.section import Section
from mtrain.config.schema.train import AnyOptimizer
from mtrain.hf.hub import is_same_repository

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class Kept:
    """A key that keeps its value from the earlier start unless this start sets it."""

    before: Any
    """Value that corresponds to the behaviour of versions without the key."""
    applies: Callable[[Config], bool]
    """Says whether the key has an effect in a configuration, so that a kept value is reported."""
    was_implied: Callable[[Mapping[str, Any]], bool] = lambda earlier: True
    """Says whether a flat earlier configuration without the key behaved as with that value."""


KEPT = {
    "optimizer.schedule_convention": Kept("one_ahead", lambda config: True),
    "data.chat_template": Kept("plain", lambda config: config.data.kind == "sft"),
    "data.packing.across_epochs": Kept(
        True, lambda config: config.steps_count_rows, lambda earlier: earlier.get("data.packing.batch") == "rows"
    ),
    # the default all-linear counts as not set
    "adapter.targets": Kept(("qkv", "proj", "fc1", "fc2"), lambda config: config.adapter is not None),
}

_SEEN_IN_FINGERPRINT = ("data.tokenizer",)
"""Keys of files that may move: the data's fingerprint in the checkpoint covers their content."""
_TEMPLATE = "data.chat_template"
TEACHER = "loss.teacher.checkpoint"
"""Key of weights that may move: a checkpoint has their fingerprint."""
REFERENCE = "loss.reference"
"""Key of weights that may move: the folder has their fingerprint, and the data's fingerprint covers their scores."""
_SOURCES = ("data.train", "data.curriculum")
"""Keys of sources whose paths may change: the data's fingerprint identifies their content."""
_SOURCE_DEFAULTS = {
    name: field.default for name, field in SourceSection.model_fields.items() if not field.is_required()
}

_DECAY = "optimizer.decay_steps"
"""Key that is compared by its effect, since its default follows from train.num_steps."""


def continued(config: Config, saved: str, folder: Path, newest_step: int) -> Config:
    """Returns the configuration with which a run continues from its checkpoints.

    Raises:
        RunFolderError: The configuration describes another run, without consent.
    """
    merged = _with_kept(config, flat_keys(saved))
    allowed_changes(merged, saved, folder, newest_step)
    return merged


def allowed_changes(config: Config, saved: str, folder: Path, step: int, teacher_is_known: bool = True) -> list[Change]:
    """Lists the changes that a run makes from a step on, without neutral keys.

    Args:
        teacher_is_known: Whether the checkpoint has the teacher's fingerprint, so that the teacher's path may change.

    Raises:
        RunFolderError: A change describes another run, and checkpoint.allow_changed does not permit it.
    """
    candidates = [change for change in changes(saved, config) if change.key != _DECAY]
    run_changes = [change for change in candidates if _is_other_run(change, teacher_is_known)]
    permitted = config.checkpoint.allow_changed
    if refused := [change.key for change in run_changes if not is_permitted(change.key, permitted)]:
        raise _other_run(folder, refused)
    if any(change.key == "optimizer.schedule" for change in run_changes):
        return run_changes  # consent to another schedule covers its decay
    try:
        _refuse_another_schedule(config, flat_keys(saved), folder, step)
    except RunFolderError:
        if not is_permitted(_DECAY, permitted):
            raise
        run_changes += _changes_of_decay(config, flat_keys(saved), folder)
    return run_changes


def kept_lines(requested: Config, continuing: Config) -> Iterator[str]:
    """Yields a line for the user for each key of KEPT whose value comes from the earlier start.

    Args:
        requested: Configuration of this start.
        continuing: Result of `continued`.
    """
    for key, rule in KEPT.items():
        if not rule.applies(continuing):
            continue
        *path, name = key.split(".")
        value = getattr(_section_at(continuing, path), name)
        if value != getattr(_section_at(requested, path), name):
            shown = ", ".join(value) if isinstance(value, tuple) else str(value).lower()
            yield f"{key}={shown} stays, since this run began with it"


def _with_kept(config: Config, earlier: Mapping[str, Any]) -> Config:
    for key, rule in KEPT.items():
        *path, name = key.split(".")
        section = _section_at(config, path)
        if section is None or name not in type(section).model_fields or name in section.model_fields_set:
            continue
        if key in earlier or rule.was_implied(earlier):
            value = earlier.get(key, rule.before)
            value = tuple(value) if isinstance(value, list) else value
            config = _replaced(config, [*path, name], value)
    # the revision that the run started from, if `model.hf` is another one in the hub's cache
    hf, earlier_hf = config.model.hf, earlier.get("model.hf")
    if hf is not None and isinstance(earlier_hf, str) and is_same_repository(hf, earlier_hf):
        config = _replaced(config, ["model", "hf"], earlier_hf)
    return config


def _section_at(config: Section, path: Sequence[str]) -> Section | None:
    """Returns the section at a path of keys; None if it or a section above it is absent."""
    section: Section | None = config
    for name in path:
        section = getattr(section, name, None)
    return section


def _replaced(section: AnySection, path: Sequence[str], value: Any) -> AnySection:
    """Returns a copy of a section with another value at a path of keys."""
    name, *remaining = path
    return section.model_copy(
        update={name: _replaced(getattr(section, name), remaining, value) if remaining else value}
    )


def _is_other_run(change: Change, teacher_is_known: bool) -> bool:
    """Says whether a change describes another run; a key that an older version lacked may keep its old meaning."""
    if change.is_neutral or change.key in _SEEN_IN_FINGERPRINT or _only_moves(change):
        return False
    may_move = change.key == REFERENCE or (change.key == TEACHER and teacher_is_known)
    if may_move and None not in (change.old, change.new):
        return False
    old_meaning = KEPT[change.key].before if change.key in KEPT else _default(change.key)
    return change.old is not None or change.new != json.dumps(old_meaning, ensure_ascii=False, default=str)


def _only_moves(change: Change) -> bool:
    """Says whether only paths of sources or the template differ; the data's fingerprint covers their content."""
    if change.old is None or change.new is None:
        return False
    if change.key == _TEMPLATE:
        return all(is_path_of_template(json.loads(text)) for text in (change.old, change.new))
    if change.key not in _SOURCES:
        return False
    old, new = (_without_paths(json.loads(text)) for text in (change.old, change.new))
    return bool(old == new)


def _without_paths(sources: Any) -> Any:
    """Returns sources, or blends of sources, without paths; keys that an older version lacked get their default."""
    if not isinstance(sources, list):
        return sources
    return [_without_path(source) if isinstance(source, dict) else source for source in sources]


def _without_path(source: dict[str, Any]) -> dict[str, Any]:
    if "sources" in source:
        return {**source, "sources": _without_paths(source["sources"])}
    return {**_SOURCE_DEFAULTS, **source, "path": None}


def _default(key: str) -> Any:
    """Returns the default of a dotted key, in any kind of its section; PydanticUndefined without a default."""
    *parents, name = key.split(".")
    fields = [section.model_fields[name] for section in sections_at(tuple(parents)) if name in section.model_fields]
    return fields[0].get_default(call_default_factory=True) if fields else PydanticUndefined


def _refuse_another_schedule(config: Config, earlier: Mapping[str, Any], folder: Path, newest_step: int) -> None:
    """Refuses changed learning rates; configurations may differ only in train.num_steps and optimizer.decay_steps."""
    optimizer, num_steps = config.optimizer, config.train.num_steps
    if optimizer.decay == "none":
        return
    old, old_num_steps = _earlier_schedule(config.optimizer, earlier, folder)
    old_decay, lengths = decay_steps(old, old_num_steps), f"train.num_steps={num_steps} was {old_num_steps}"
    if optimizer.decay_steps is None and num_steps != old_num_steps:
        raise RunFolderError(
            f"{lengths} at the earlier start in {folder}, and the {optimizer.schedule} schedule ends with it, so every "
            f"learning rate would change; set {_DECAY}={old_decay} to keep the decay as it was, "
            f"train.num_steps={old_num_steps}, or another run.dir; or let the rates change from here on, with "
            f"checkpoint.allow_changed=[{_DECAY}]"
        )
    if decay_steps(optimizer, num_steps) != old_decay:
        raise _other_run(folder, [_DECAY])
    last = newest_step - 1  # once two schedules differ, they stay different, so comparing the last update is enough
    if learning_rate(last, old, old_num_steps) != learning_rate(last, optimizer, num_steps):
        raise RunFolderError(
            f"{lengths} at the earlier start in {folder}, whose checkpoint of step {newest_step} is in the final "
            f"decay: past updates would have had another learning rate; set train.num_steps={old_num_steps}, or start "
            "a new run from an earlier checkpoint with checkpoint.initialize_from and another run.dir"
        )


def _changes_of_decay(config: Config, earlier: Mapping[str, Any], folder: Path) -> list[Change]:
    """Lists the permitted changes of a decay, which may follow from train.num_steps."""
    old, old_num_steps = _earlier_schedule(config.optimizer, earlier, folder)
    num_steps = config.train.num_steps
    numbers = {
        _DECAY: (decay_steps(old, old_num_steps), decay_steps(config.optimizer, num_steps)),
        "train.num_steps": (old_num_steps, num_steps),
    }
    return [Change(key, str(before), str(now), False) for key, (before, now) in numbers.items() if before != now]


def _earlier_schedule(optimizer: AnyOptimizer, earlier: Mapping[str, Any], folder: Path) -> tuple[AnyOptimizer, int]:
    """Returns the optimizer section with the earlier start's decay, and the earlier start's number of steps."""
    earlier_decay = earlier.get(_DECAY) and _count(earlier, _DECAY, folder)
    return optimizer.model_copy(update={"decay_steps": earlier_decay}), _count(earlier, "train.num_steps", folder)


def _count(earlier: Mapping[str, Any], key: str, folder: Path) -> int:
    value = earlier.get(key)
    if not isinstance(value, int):
        raise RunFolderError(f"config.yaml in {folder} has {key}={value!r}, but a number is needed; repair the file")
    return value


def _other_run(folder: Path, keys: list[str]) -> RunFolderError:
    fixed = [key for key in keys if not is_permitted(key, keys)]
    never = f" ({', '.join(fixed)} cannot change in a run)" if fixed else ""
    return RunFolderError(
        f"{folder} contains checkpoints of a run whose {', '.join(keys)} had other values; set the same values, set "
        f"another run.dir, or list the keys that may change from here on in checkpoint.allow_changed{never}"
    )
