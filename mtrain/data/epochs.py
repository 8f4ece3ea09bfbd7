"""The number of steps of a run whose length is given in epochs."""

import math
from dataclasses import dataclass
from fractions import Fraction

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.load import Given, whole
from mtrain.config.schema.data import FilesSection, PackingSection
from mtrain.data.sources import SampleStream, Sources
from mtrain.data.steps import steps_of


@dataclass(frozen=True)
class Epochs:
    """Passes through the only source of a run."""

    config: Config
    stream: SampleStream

    @property
    def num_sequences(self) -> int:
        ((_, size),) = self.stream.named_sizes
        assert size is not None, "files have an end"
        return size

    @property
    def packing(self) -> PackingSection | None:
        """Returns the packing with a window of at most an epoch. It is recorded, so that runs of earlier versions
        continue with theirs."""
        packing = self.config.data.packing
        if packing is None or not self.config.steps_count_rows:
            return packing
        return packing.model_copy(update={"window": min(packing.window, self.num_sequences)})

    def num_steps(self, num_sequences: int) -> int:
        """Returns the fewest steps that hold so many sequences."""
        data = self.config.data.model_copy(update={"packing": self.packing})
        return steps_of(self.config.model_copy(update={"data": data}), self.stream).holding(num_sequences)


def with_num_steps(config: Config) -> Config:
    """Returns the configuration with `train.num_steps` in place of `train.num_epochs`; opens the training data.

    These are the fewest steps that hold all samples of these epochs. `optimizer.warmup_ratio` becomes steps as well.
    """
    if config.train.num_epochs is None:
        return config
    key, data = f"train.num_epochs={config.train.num_epochs:g}", config.data
    if not isinstance(data, FilesSection):
        raise ConfigError(f"{key}, but data.kind={data.kind} has no end; set train.num_steps")
    if len(data.all_sources) > 1:
        raise ConfigError(
            f"{key} counts passes through one source, but data.train and data.curriculum name {len(data.all_sources)}, "
            "of which weights decide how often each is passed; name their files by one pattern or folder, or set "
            "train.num_steps"
        )
    epochs = Epochs(config, Sources(config).training())
    # as text: 0.1 is a tenth here, not the float next to it
    num_sequences = math.ceil(Fraction(str(config.train.num_epochs)) * epochs.num_sequences)
    content = config.model_dump()
    content["data"]["packing"] = None if epochs.packing is None else epochs.packing.model_dump()
    content["train"] |= {"num_epochs": None, "num_steps": epochs.num_steps(num_sequences)}
    return Given(content, ()).config(whole)
