from collections.abc import Callable, Sequence

import torch

from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.schedule import run_forward
from mtrain.core.layers.build import run_chunk, unwrap
from mtrain.core.layers.divided_weights import free_gathered
from mtrain.core.layers.output_layer import DeferredLogits, Logits
from mtrain.core.ranks.groups import Groups

LogitsOf = Callable[[Microbatch], DeferredLogits]
"""Maps a sliced microbatch to the teacher's deferred logits on the last stage; called once per microbatch."""


class Teacher:
    """The teacher's stages on this rank."""

    def __init__(self, config: Config, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
        """Makes a teacher.

        Args:
            config: Configuration of the run, with the teacher's architecture in `model`.
            chunks: Frozen chunks, one for each virtual stage.
        """
        self.config, self.chunks, self.groups = config, list(chunks), groups
        # a pipeline of teacher stages needs a schedule of its own, which cannot run inside the student's forward step
        self._runs_alone = groups.layout.pp > 1

    def logits_of(self, batches: Sequence[Microbatch]) -> LogitsOf:
        """Returns a function that gives the teacher's logits for each microbatch of a step. Collective over PP, TP and
        CP.

        Without pipeline parallelism the teacher runs when that function is called, and stores nothing. With pipeline
        parallelism it runs now, on all microbatches, and the last stage stores their hidden states until they are used.
        """
        free_gathered(map(unwrap, self.chunks))  # no backward pass of a teacher does
        if not self._runs_alone:
            return self._run_now
        # keyed by id: the schedules pass the very objects in `batches` on
        outputs: dict[int, DeferredLogits] = {}

        def keep(logits: Logits, batch: Microbatch) -> None:
            outputs[id(batch)] = logits.main  # [seq_local, batch, hidden], for all microbatches of the step

        run_forward(self.chunks, batches, keep, self.config)
        return lambda batch: outputs.pop(id(batch))  # popped, so that memory is freed after each microbatch

    @torch.no_grad()
    def _run_now(self, batch: Microbatch) -> DeferredLogits:
        (chunk,) = self.chunks
        output = run_chunk(chunk, batch)
        assert isinstance(output, Logits), "the last stage returns logits"
        return output.main
