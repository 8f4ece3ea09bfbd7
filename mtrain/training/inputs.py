"""Inputs of a run besides its training data: named in its checkpoints, compared at each start, the same on all ranks;
no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.config.changes import Change
from mtrain.config.consent import is_permitted
from mtrain.config.schema.data import AnyData, IndexedSection
from mtrain.config.schema.loss import LossSection
from mtrain.runs.continuation import TEACHER

VALID = "data.valid"
"""Section of validation sets, whose fingerprints lie under it by name."""
_NO_PART_OF_THE_MAIN_TERM = {
    "side_terms",
    "router",
    "teacher",
    "mtp_coefficient",
    "chunk_tokens",
    "denominator",
    "allow_layout_dependent",
}


def of_validation(sets: Mapping[str, str]) -> dict[str, str]:
    """Returns fingerprints of validation sets, given by name, by the keys that name them."""
    return {f"{VALID}.{name}": fingerprint for name, fingerprint in sets.items()}


def valid_measure(loss: LossSection, data: AnyData, inputs: Mapping[str, str]) -> str | None:
    """Identifies what validation losses measure: the first set, and the main term; None without a set."""
    first = next((value for key, value in inputs.items() if key.startswith(f"{VALID}.")), None)
    if first is None:
        return None
    # without defaults, so that a key that is added to the program changes none
    term = loss.model_dump(mode="json", exclude_defaults=True, exclude=_NO_PART_OF_THE_MAIN_TERM)
    isolates = isinstance(data, IndexedSection) and data.isolate_documents
    decisive = [first, term, isolates, inputs.get("loss.function"), inputs.get(TEACHER)]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def changed_inputs(
    entry: CheckpointEntry, inputs: Mapping[str, str], allow_changed: Sequence[str], renamed: Collection[str] = ()
) -> list[Change]:
    """Returns the inputs that differ from those of a checkpoint; those that it does not name are not compared.

    Validation sets may change without consent: they decide no update.

    Args:
        allow_changed: Keys that may change, as in `checkpoint.allow_changed`.
        renamed: Keys that have another value with consent, and so name something else.

    Raises:
        DataError: One has changed without consent.
    """
    saved = {key: value for key, value in entry.manifest.inputs.items() if key not in renamed}
    found = []
    for key in sorted(key for key in saved.keys() & inputs.keys() if saved[key] != inputs[key]):
        is_neutral = key.startswith(f"{VALID}.")
        if not is_neutral and not is_permitted(key, allow_changed):
            raise _refused(key, saved[key], inputs[key], entry.path)
        found.append(Change(key, f"fingerprint {saved[key]}", f"fingerprint {inputs[key]}", is_neutral))
    return found


def _refused(key: str, old: str, new: str, checkpoint: Path) -> DataError:
    if key == TEACHER:
        what = f"{key} names another teacher than the one that {checkpoint} learned from"
        back = "name the checkpoint of before (a run folder stands for its newest one)"
    else:
        what = f"the source of {key} is not the one that {checkpoint} was trained with"
        back = "restore the file, with the modules of yours that it imports"
    return DataError(
        f"{what} (fingerprint {new}, not {old}), so the steps to come would be those of another run; {back}, or go on "
        f"with the new one by checkpoint.allow_changed=[{key}]"
    )


def differing(own: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    """Returns the first key that this rank and rank 0 both know by different fingerprints, if any."""
    return next((key for key in sorted(own.keys() & first.keys()) if own[key] != first[key]), None)
