"""Finds the checkpoint that a start resumes from, and the changes since then of the configuration, the training data
and other inputs, which need the user's consent; no torch."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mtrain.base.errors import DataError, RunFolderError
from mtrain.base.files import disk_faults
from mtrain.base.plain_files import NOT_A_PLAIN_FILE, read_plain_file
from mtrain.base.spelling import counted
from mtrain.base.yaml_text import MAX_BYTES, read_yaml
from mtrain.checkpoint.store.directory import CheckpointEntry, Newest, newest_good
from mtrain.checkpoint.store.manifest import CONFIG_NAME, ChangeInfo
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from mtrain.config.changes import Change
from mtrain.config.consent import is_permitted
from mtrain.config.schema.data import AnyData, IndexedSection
from mtrain.config.schema.loss import LossSection
from mtrain.config.schema.run import CheckpointSection
from mtrain.data.formats.megatron_indexed import same_fingerprint
from mtrain.data.sources import REFERENCES
from mtrain.data.steps import Windows, fingerprint_until, has_phases, known_until, windows_in
from mtrain.report.metrics.record import ChangeRecord
from mtrain.runs.continuation import REFERENCE, TEACHER, allowed_changes, continued
from mtrain.runs.folder import RunFolder

DATA = "data.train"
"""Key of a change of training data."""
CURRICULUM = "data.curriculum"
"""Key of a change of training data that affects only future steps."""
ORIGIN = "model.hf"
"""Key of the name and commit of a model in the hub's cache."""
VALID = "data.valid"
"""Prefix of the keys of validation sets' fingerprints."""
_NO_PART_OF_THE_MAIN_TERM = {
    "side_terms",
    "router",
    "teacher",
    "mtp_coefficient",
    "chunk_tokens",
    "denominator",
    "allow_layout_dependent",
}


class KnownData(Protocol):
    """Fingerprints of training data."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def earlier_fingerprints(self) -> tuple[str, ...]: ...


def going_on(folder: RunFolder, config: Config) -> Config:
    """Returns the configuration with the values that an earlier start decided; unchanged without a checkpoint."""
    saved, steps = folder.saved_config(), published_steps(folder.checkpoints)
    # a run that failed before its first save may change its configuration
    if saved is None or not steps:
        return config
    # the last start may have changed something and crashed before it saved
    saved = checkpoint_config(folder.checkpoints / step_name(steps[-1])) or saved
    return continued(config, saved, folder.path, steps[-1])


def resumable(checkpoint: CheckpointSection, folder: RunFolder, unusable: Mapping[int, str] | None = None) -> Newest:
    """Returns the newest good checkpoint of the run, from which it resumes; `unusable` maps damaged steps to faults."""
    newest = newest_good(folder.checkpoints, unusable)
    if newest.entry is not None and checkpoint.resume == "never":
        raise RunFolderError(
            f"checkpoint.resume=never, but {folder.path} holds a checkpoint of step {newest.entry.step}; set another "
            "run.dir or checkpoint.resume=auto"
        )
    return newest


def changes_since(
    entry: CheckpointEntry, data: KnownData, config: Config, run_folder: Path, inputs: Mapping[str, str]
) -> tuple[ChangeInfo, ...]:
    """Returns all changes of a run: those recorded in its checkpoint, and those of this start.

    Only changes since the checkpoint count, not those of a start that crashed before it saved.

    Raises:
        RunFolderError: A key has another value without consent.
        DataError: The training data or another input have changed without consent.
    """
    saved = checkpoint_config(entry.path)
    knows_teacher = TEACHER in entry.manifest.inputs
    changes = [] if saved is None else allowed_changes(config, saved, run_folder, entry.step, knows_teacher)
    fingerprint = change_of_data(entry, data, config.checkpoint, changes)
    input_changes = changed_inputs(entry, inputs, config.checkpoint.allow_changed, [change.key for change in changes])
    new = [*changes, *([] if fingerprint is None else [fingerprint]), *input_changes]
    return (
        *entry.manifest.changes,
        *(ChangeInfo(step=entry.step, key=change.key, old=change.old, new=change.new) for change in new),
    )


def change_of_data(
    entry: CheckpointEntry, data: KnownData, checkpoint: CheckpointSection, changes: Sequence[Change] = ()
) -> Change | None:
    """Returns the change of training data whose fingerprint differs from the checkpoint's; None for the same data, even
    if they were moved. A change of `data.*` among `changes` permits other data."""
    saved = entry.manifest.dataset
    known = (data.fingerprint, *data.earlier_fingerprints)
    if saved is None or any(same_fingerprint(saved, fingerprint) for fingerprint in known):
        return None
    past = known_until(saved, entry.step)
    if any(same_fingerprint(past, known_until(fingerprint, entry.step)) for fingerprint in known):
        return None  # data.packing may change without consent, and all samples so far were the same
    if has_phases(saved) or has_phases(data.fingerprint):
        return _change_of_curriculum(entry, saved, known, checkpoint, changes)
    has_other_scores = saved.partition(REFERENCES)[0] == data.fingerprint.partition(REFERENCES)[0]
    if has_other_scores and is_permitted(REFERENCE, checkpoint.allow_changed):
        return Change(REFERENCE, f"fingerprint {saved}", f"fingerprint {data.fingerprint}", is_neutral=False)
    is_explained = any(change.key.startswith("data.") for change in changes)
    if is_explained or is_permitted(DATA, checkpoint.allow_changed):
        return Change(DATA, f"fingerprint {saved}", f"fingerprint {data.fingerprint}", is_neutral=False)
    _refuse_other_windows(saved, data.fingerprint, entry)
    if has_other_scores:
        raise DataError(
            f"the scores of the reference model are not those that {entry.path} was trained with (fingerprint "
            f"{data.fingerprint}, not {saved}): they were removed, and the reference's weights have changed since; "
            "restore `references` in the run folder or these weights, or continue with the new scores by "
            f"checkpoint.allow_changed=[{DATA}]"
        )
    raise DataError(
        f"the training data are not those that {entry.path} has seen (fingerprint {data.fingerprint}, not {saved}): "
        "resuming would repeat or leave out samples; restore the data, start a new run from these weights with "
        f"another run.dir and checkpoint.initialize_from={entry.path}, or continue with the new data by "
        f"checkpoint.allow_changed=[{DATA}]"
    )


def _refuse_other_windows(saved: str, now: str, entry: CheckpointEntry) -> None:
    """Refuses another packing of samples into steps, and says what to set."""
    before, after = windows_in(saved), windows_in(now)
    if before is None or after is None or before == after:
        return
    old = (
        f"data.packing.window={before.window}, train.global_batch_size={before.num_rows} and rows of {before.row_width}"
        f"{_later(before)}"
    )
    new = f"{after.window}, {after.num_rows} and {after.row_width}{_later(after)}"
    suggestion = f"data.packing.later=[{{from_step: {entry.step}, window: {after.window}}}]"
    is_window = before._replace(window=after.window) == after
    raise DataError(
        f"{entry.path} has packed rows from windows ({old}), but this start gives {new}: the window in progress would "
        "be repacked, so samples would be repeated or left out; restore the earlier values (rows are as wide as "
        "train.tokens_per_micro_batch, else data.seq_length), start a new run from these weights with another "
        f"run.dir and checkpoint.initialize_from={entry.path}, or accept that by checkpoint.allow_changed=[{DATA}]"
        + (f"; or, for future windows only, keep data.packing.window and add {suggestion}" if is_window else "")
    )


def _later(windows: Windows) -> str:
    sizes = ", ".join(f"{window} from {counted(step, 'update')} on" for step, window in windows.later)
    across = ", data.packing.across_epochs=true" if windows.across_epochs else ""
    return (f", data.packing.later: {sizes}" if sizes else "") + across


def _change_of_curriculum(
    entry: CheckpointEntry, saved: str, known: Sequence[str], checkpoint: CheckpointSection, changes: Sequence[Change]
) -> Change:
    """Returns the change of blends that the checkpoint had not reached yet; refuses a change of earlier ones."""
    past = fingerprint_until(saved, entry.step)
    if not any(same_fingerprint(past, fingerprint_until(fingerprint, entry.step)) for fingerprint in known):
        raise DataError(
            f"data.train and data.curriculum change the data of steps 1 to {entry.step}, which {entry.path} has "
            f"completed (fingerprint {fingerprint_until(known[0], entry.step)}, not {past}): past training cannot "
            "change; restore the data of these steps, give the data from here on as a blend of data.curriculum with "
            f"from_step={entry.step} or more, or start a new run from these weights with another run.dir and "
            f"checkpoint.initialize_from={entry.path}"
        )
    is_explained = any(change.key.startswith("data.") for change in changes)
    if not is_explained and not is_permitted(CURRICULUM, checkpoint.allow_changed):
        raise DataError(
            f"the data that data.curriculum gives after step {entry.step} are not those with which {entry.path} should "
            f"continue (fingerprint {known[0]}, not {saved}); restore them, or continue with the new ones by "
            f"checkpoint.allow_changed=[{CURRICULUM}]"
        )
    return Change(CURRICULUM, f"fingerprint {saved}", f"fingerprint {known[0]}", is_neutral=False)


def checkpoint_config(path: Path) -> str | None:
    """Returns the resolved configuration that a checkpoint was saved with, as YAML; None if it cannot be read."""
    with disk_faults(f"read {path / CONFIG_NAME}"):
        try:
            text = read_plain_file(path / CONFIG_NAME, MAX_BYTES).decode()
            return text if isinstance(read_yaml(text).content, dict) else None
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as fault:
            # not a plain file: the checkpoint is damaged, and will be rejected in favour of another one
            if fault.errno not in NOT_A_PLAIN_FILE:
                raise
            return None


def note_on_order(changes: Sequence[ChangeRecord], global_batch_size: int, unit: str) -> str | None:
    """Returns a note on which samples, or other units of a batch, follow if a start changes the data; None if it does
    not."""
    of_data = [
        change for change in changes if change.key.startswith("data.") and not change.key.startswith(f"{VALID}.")
    ]
    if not of_data:
        return None
    if any(change.key == CURRICULUM for change in of_data):
        return "the data of all steps so far are unchanged; the change applies to future steps"
    first = of_data[0].step * global_batch_size
    return (
        f"the data continue with {unit} {first} of their new order, as if that had been the order from the start: "
        "earlier samples of the new order are not read in that epoch"
    )


def validation_inputs(sets: Mapping[str, str]) -> dict[str, str]:
    """Returns fingerprints of validation sets, which `sets` gives by name, by their keys in checkpoints."""
    return {f"{VALID}.{name}": fingerprint for name, fingerprint in sets.items()}


def valid_measure(loss: LossSection, data: AnyData, inputs: Mapping[str, str], name: str | None = None) -> str | None:
    """Hashes everything that defines the validation loss, so that equal hashes mean comparable losses: the set of this
    name, by default the first, and the main term. None without a set."""
    sets = {key: value for key, value in inputs.items() if key.startswith(f"{VALID}.")}
    first = next(iter(sets.values()), None) if name is None else sets.get(f"{VALID}.{name}")
    if first is None:
        return None
    # without defaults, so that a key that a later version adds leaves the hash unchanged
    term = loss.model_dump(mode="json", exclude_defaults=True, exclude=_NO_PART_OF_THE_MAIN_TERM)
    isolates = isinstance(data, IndexedSection) and data.isolate_documents
    decisive = [first, term, isolates, inputs.get("loss.function"), inputs.get(TEACHER)]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def changed_inputs(
    entry: CheckpointEntry, inputs: Mapping[str, str], allow_changed: Sequence[str], renamed: Collection[str] = ()
) -> list[Change]:
    """Returns the inputs that differ from those of a checkpoint; inputs that it does not name are not compared.

    Validation sets may change without consent, since they affect no update, and so may the model that the run started
    from.

    Args:
        allow_changed: Keys that may change, as in `checkpoint.allow_changed`.
        renamed: Keys whose value has changed with consent, so that their input is another one.

    Raises:
        DataError: An input differs without consent.
    """
    saved = {key: value for key, value in entry.manifest.inputs.items() if key not in renamed}
    changes = []
    for key in sorted(key for key in saved.keys() & inputs.keys() if saved[key] != inputs[key]):
        is_neutral = key.startswith(f"{VALID}.") or key == ORIGIN
        if not is_neutral and not is_permitted(key, allow_changed):
            raise _refused(key, saved[key], inputs[key], entry.path)
        changes.append(Change(key, f"fingerprint {saved[key]}", f"fingerprint {inputs[key]}", is_neutral))
    return changes


def _refused(key: str, old: str, new: str, checkpoint: Path) -> DataError:
    if key == TEACHER:
        what = f"{key} names another teacher than the one {checkpoint} was trained with"
        back = "name the earlier checkpoint (a run folder means its newest one)"
    else:
        what = f"the source of {key} is not the one that {checkpoint} was trained with"
        back = "restore the file, with your modules that it imports"
    return DataError(
        f"{what} (fingerprint {new}, not {old}), so future steps would be those of another run; {back}, or continue "
        f"with the new one by checkpoint.allow_changed=[{key}]"
    )
