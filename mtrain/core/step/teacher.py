from collections.abc import Callable, Sequence

import torch

from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.schedule import run_forward
from mtrain.core.layers.build import run_chunk
from mtrain.core.layers.output_layer import DeferredLogits, Logits
from mtrain.core.ranks.groups import Groups

LogitsOf = Callable[[Microbatch], DeferredLogits]
"""Sliced microbatch -> the teacher's deferred logits, on the last stage; called once per microbatch."""


class Teacher:
    """The teacher's stages on this rank."""

    def __init__(self, config: Config, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
        """Takes frozen chunks, one for each virtual stage, and the run's configuration with their architecture in
        `model`."""
        self.config, self.chunks, self.groups = config, list(chunks), groups
        # its stages need a schedule of their own, which cannot run inside the student's forward step
        self._runs_alone = groups.layout.pp > 1

    def logits_of(self, batches: Sequence[Microbatch]) -> LogitsOf:
        """Returns a function that gives the teacher's logits of each microbatch of a step. Collective over PP, TP and
        CP.

        Without a pipeline the teacher runs when the function is called, and keeps nothing. With one it runs now, on all
        microbatches, and the last stage keeps the hidden states of each until they are used.
        """
        if not self._runs_alone:
            return self._run_now
        # by id: the schedules pass on the objects that they were given
        outputs: dict[int, DeferredLogits] = {}

        def keep(logits: Logits, batch: Microbatch) -> None:
            outputs[id(batch)] = logits.main  # [seq_local, batch, hidden], for all microbatches of the step

        run_forward(self.chunks, batches, keep, self.config)
        return lambda batch: outputs.pop(id(batch))  # popped, so that each is freed after its microbatch

    @torch.no_grad()
    def _run_now(self, batch: Microbatch) -> DeferredLogits:
        (chunk,) = self.chunks
        output = run_chunk(chunk, batch)
        assert isinstance(output, Logits), "the last stage gives logits"
        return output.main
