"""Every planted fault has an existing target: a renamed one is reported here, without training."""

import dataclasses
import importlib
import inspect

import pytest

from mtrain.config.schema.train import AdamWSection
from mtrain.core.step.step import StepFunctions
from mtrain.verify.planted.collaborators import SOUND, with_values
from mtrain.verify.planted.faults import PLANTS
from mtrain.verify.planted.shared_inject import POLICY_LOSSES
from mtrain.verify.reference import policy
from mtrain.verify.resume import faults as resume
from tests.verify.parity.checks import rich_config

FILES = ("planted.faults", "planted.shared_faults", "resume.faults")


def without_target(kind: type) -> list[str]:
    """Lists methods and attributes of a faulty collaborator that replace none, or take other arguments."""
    missing = []
    for name, value in vars(kind).items():
        replaced = next((vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)), None)
        if (name.startswith("__") and name != "__init__") or not (callable(value) or isinstance(value, property)):
            continue
        if replaced is None or (inspect.isfunction(value) and names(value) != names(replaced)[: len(names(value))]):
            missing.append(f"{kind.__name__}.{name}")
    return missing


def names(function: object) -> list[str]:
    """Returns the names of the function's arguments, without `*others`."""
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    return [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL]


def collaborators(file: str) -> list[type]:
    module = importlib.import_module(f"mtrain.verify.{file}")
    return [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]


@pytest.mark.parametrize("file", FILES)
def test_a_faulty_collaborator_takes_the_place_of_a_sound_one(file: str) -> None:
    derived = [kind for kind in collaborators(file) if kind.__mro__[1] is not object]
    assert derived
    assert [name for kind in derived for name in without_target(kind)] == []


def test_a_target_that_is_gone_is_seen() -> None:
    class Sound:
        def kept(self, one: int) -> None: ...

    class Faulty(Sound):
        def gone(self) -> None: ...

        def kept(self, other: int) -> None: ...

    assert without_target(Faulty) == ["Faulty.gone", "Faulty.kept"]
    with pytest.raises(AssertionError, match="AdamWSection has no such keys"):
        with_values(AdamWSection(lr=1.0), {"gone": 1})


def test_every_fault_is_one_other_collaborator() -> None:
    """Each fault replaces one collaborator of the run, or of the step where that is the step."""
    for name, plant in PLANTS.items():
        changed = [
            field.name
            for field in dataclasses.fields(plant)
            if getattr(plant, field.name) != getattr(SOUND, field.name)
        ]
        assert len(changed) == 1, name
    assert all(plant != resume.SOUND for plant in resume.PLANTS.values())


def test_a_step_is_made_of_its_parts() -> None:
    assert {field.name for field in dataclasses.fields(StepFunctions)} == {
        "factors",
        "slice_rows",
        "output_loss",
        "routers",
        "run_schedule",
        "finalize",
    }
    assert SOUND.config(config := rich_config()) is config


def test_faults_of_extras_are_for_the_losses_that_the_reference_defines() -> None:
    assert set(POLICY_LOSSES) == {"kl", *policy.POLICY_LOSSES}
