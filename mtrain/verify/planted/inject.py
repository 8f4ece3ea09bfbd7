"""Known faults, each planted in one place on the ranks of a layout to show that the check finds it.

Each occurred in a real trainer. The reference never has one, and only `--inject NAME` plants one. `TESTS` lists the
faults that only tests plant.
"""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import meant
from mtrain.config import Config


@dataclass(frozen=True)
class Fault:
    """Known fault and the conditions under which it shows."""

    name: str
    text: str
    axis: str | None = None
    """Axis that the layout must use; None: one process with one microbatch shows the fault."""
    condition: Callable[[Config], bool] = lambda config: True
    condition_text: str = ""


_READS_IMAGES: tuple[Callable[[Config], bool], str] = (
    lambda config: config.model.vision is not None,
    "model.vision",
)
FAULTS = (
    Fault("microbatch-means", "averages the means of the microbatches", "microbatches"),
    Fault("tp-counts-again", "adds up the denominator once for each tensor-parallel rank", "tp"),
    Fault("sp-norms-not-reduced", "does not sum the norms' gradients over the sequence-parallel ranks", "sp"),
    Fault(
        "tied-gradient-missed",
        "does not sum the gradients of the tied tables between the first and the last stage",
        "pp",
        lambda config: config.model.tied_embeddings,
        "model.tied_embeddings=true",
    ),
    Fault("positions-not-zigzag", "numbers positions as if each rank held one piece of the row", "cp"),
    Fault("sharded-gradients-averaged", "averages gradients of sharded weights over their ranks", "shard"),
    Fault(
        "document-boundary-crossed",
        "lets attention see the documents packed before",
        None,
        lambda config: config.data.isolate_documents,
        "data.isolate_documents=true or data.packing",
    ),
    Fault("images-misplaced", "puts the features of an image at the tokens of the one before", None, *_READS_IMAGES),
    Fault("image-positions-on-one-axis", "counts rows and columns of images like time", None, *_READS_IMAGES),
)
"""Faults of `verify parity` and `verify hf`, one for each axis."""
RESUME_FAULTS = (Fault("moments-not-restored", "begins with moments of 0"),)
PREEMPT_FAULTS = (Fault("record-lost", "loses the last record that was written before the stop"),)
DROPPED_ELEMENT = Fault("dropped-element", "loses the last element of each all-gather")
WRONG_SUM = Fault("wrong-sum", "adds 1 to a sum on the last rank of each group")
SLOW_LINK = Fault("slow-link", "delays messages from rank 0 to rank 1, which is shown and fails nothing")
MACHINE_FAULTS = (DROPPED_ELEMENT, WRONG_SUM, SLOW_LINK)
BACKEND_FAULTS = (Fault("missing-gradient", "gives the projection of the attention's output no gradient"),)

TESTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("tests.toml").read_text(encoding="utf-8"))
"""Tests below tests/verify, with the faults that they plant."""


def chosen(name: str, config: Config, axes: Iterable[str], faults: Sequence[Fault] = FAULTS) -> Fault:
    """Returns the fault of this name.

    Raises:
        ConfigError: The fault is unknown or a test, or cannot show with these axes of layouts and this shrunk
            configuration.
    """
    known = {fault.name: fault for fault in faults}
    fault = known.get(name)
    if fault is None:
        raise _unknown_fault(name, list(known))
    if fault.axis is not None and fault.axis not in axes:
        raise ConfigError(
            f"--inject {name} cannot show: it needs a layout that uses {fault.axis}; set it in the configuration or "
            "name one with --layouts"
        )
    if not fault.condition(config):
        raise ConfigError(f"--inject {name} cannot show: it needs {fault.condition_text}; set it")
    return fault


def _unknown_fault(name: str, names: Sequence[str]) -> ConfigError:
    for test, planted in TESTS.items():
        if name in planted.split():
            return ConfigError(
                f"--inject {name}: this fault is now planted only by a test, tests/verify/{test}; choose one of "
                f"{', '.join(names)}"
            )
    near = meant(name, names)
    hint = f"did you mean {near}?" if near else "see --list-injections"
    return ConfigError(f"--inject {name}: there is no such fault; {hint}")
