"""Every planted fault has an existing target: a renamed one is reported here, without training."""

import importlib
import inspect

import pytest

from mtrain.config.schema.train import AdamWSection
from mtrain.core.step import step
from mtrain.verify.planted import faults
from tests.verify.planted.plants import with_values
from tests.verify.planted.ranks import PLANTS
from tests.verify.resume import faults as resume

FILES = ("tests.verify.planted.faults", "tests.verify.planted.shared_faults", "tests.verify.resume.faults")


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
    module = importlib.import_module(file)
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


def test_every_fault_replaces_one_thing_that_exists() -> None:
    for name, plant in PLANTS.items():
        changes = (plant.config, plant.change_model, plant.target)
        assert sum(each is not None for each in changes) == 1, name
        with plant.planted():  # fails where the function is gone
            pass


def test_a_shipped_fault_replaces_a_function_while_it_is_planted() -> None:
    for name, (function, faulty) in faults.PLANTS.items():
        sound = getattr(step, function)
        with faults.planted(name):
            assert getattr(step, function) is faulty
        assert getattr(step, function) is sound


def test_every_fault_of_resuming_is_another_run() -> None:
    assert all(plant != resume.SOUND for plant in resume.PLANTS.values())
