"""Findings of a check before a start: facts for the user, and faults that would end the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mtrain.base.errors import MtrainError
from mtrain.plan.search.cost import PackedSteps


@dataclass
class Findings:
    """Facts and faults, in order of discovery."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    faults: list[MtrainError] = field(default_factory=list)
    packed_steps: Callable[[int], PackedSteps] | None = None
    """Maps the number of data-parallel ranks to the mean content of a step; None without packing or opened data."""

    def fact(self, name: str, value: str) -> None:
        self.facts.append((name, value))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Records a fault that ends the block, so that the check continues and finds all faults."""
        try:
            yield
        except MtrainError as fault:
            self.faults.append(fault)

    @property
    def exit_code(self) -> int:
        """Exit code of the fault that a start would report first: configuration, data, machine; 0 without a fault."""
        return min((fault.exit_code for fault in self.faults), default=0)
