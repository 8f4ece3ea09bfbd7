"""Everything that a run reads, opened before its first step; numpy, no torch."""

from __future__ import annotations

from collections.abc import Mapping

from mtrain.config import Config
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.sources import HeldOut, MockHeldOut, SampleStream, Sources
from mtrain.data.steps import Steps, steps_of
from mtrain.tokenizer import Tokenizer

REFERENCES = " (reference scores "
"""Text in a fingerprint before the scores of the reference model."""


class OpenedData:
    """The data of a configuration, as every rank that reads data opens them."""

    def __init__(self, config: Config) -> None:
        """Opens and checks all that the configuration names.

        Held-out sets are opened with the training data: a file that is missing is reported before the first step, not
        at the first validation.

        Args:
            config: Configuration of the run.

        Raises:
            ConfigError: A share of a blend cannot be met, or the loss needs other data.
            DataError: A file is missing, damaged, too small, or does not fit the model.
            MachineError: No folder can hold the token cache.
        """
        sources = Sources(config)
        self.tokenizer: Tokenizer | None = sources.tokenizer
        self.stream: SampleStream = sources.training()
        self.steps: Steps = steps_of(config, self.stream.widths)
        self.held_out: Mapping[str, Mapping[str, HeldOut | MockHeldOut]] = {
            part: sources.held_out(part) for part in ("valid", "test")
        }
        """Held-out sets by name, for each of "valid" and "test"."""
        self.preferences: Mapping[str, PreferenceDataset] = sources.preferences
        """Sources of sequences that are compared, by fingerprint."""
        self.notes: list[str] = sources.notes()
        """Lines for the user on what of the files is not trained, or not as it stands there."""

    @property
    def fingerprint(self) -> str:
        """Identifies the training data and how they are cut."""
        return self.stream.fingerprint + self.steps.fingerprint

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Lists the fingerprints that earlier versions gave the same data."""
        return tuple(each + self.steps.fingerprint for each in self.stream.earlier_fingerprints)
