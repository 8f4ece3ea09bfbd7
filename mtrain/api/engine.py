"""Engine for a user's own program: the parts of `mtrain train`, called from the user's loop.

Every method is collective: all ranks call the same ones in the same order, with the same arguments.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.api.hf_tensors import HfContent, HfTensors, WeightDeltas, need_group
from mtrain.api.turns import SharedBase, Turns, open_engines
from mtrain.arch import num_parameters
from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.core.batch.choices import choice_shapes
from mtrain.core.batch.datum import Datum, named_choices
from mtrain.core.engine.optimizer import AdamOptions
from mtrain.core.loss.functions.sources import source_fingerprints
from mtrain.core.loss.objective import AnyLoss, Objective
from mtrain.core.ranks.deterministic import deterministic
from mtrain.core.ranks.groups import opened_groups
from mtrain.core.ranks.init import joined_distributed, on_first_rank
from mtrain.core.ranks.party import purpose_of
from mtrain.core.step.forward import forward_totals
from mtrain.core.step.loss import FurtherScore
from mtrain.core.step.results import EvalResult, ForwardResult, StepResult
from mtrain.hf.io.broadcast import BUCKET_BYTES
from mtrain.runs.folder import RunFolder
from mtrain.training.batches import (
    AskedScores,
    GlobalBatches,
    checked_batch,
    checked_config,
    scores_of_samples,
    token_scores,
)
from mtrain.training.build import agreed, build_step, of_teacher
from mtrain.training.export import exported_through_checkpoint
from mtrain.training.given_images import GivenImages
from mtrain.training.resume import Progress, initialize, load_from, save_at
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.sampler import Completion, generate


class Engine(Turns):
    """A model with its optimizer, distributed over ranks according to `config.layout`.

    The engine initialises torch.distributed from the launcher's environment (torchrun, srun, `mtrain launch local`; a
    single rank without a launcher). If the program has initialised it already, the engine uses that and leaves it open
    at the end. A process can have one engine at a time; after `close` it can open another, also with another layout.

    Initial weights are those of `mtrain train`: from `checkpoint.initialize_from` or `model.hf`, or drawn from
    `train.seed`, the same under any layout. Of `data.*` the engine uses only `data.seq_length`, the length of a sample,
    and `data.packing`.

    Batches are global: every rank passes all samples, and the engine takes the rank's part. Any number of samples is
    allowed; empty rows with weight 0 complete the last microbatch. With `data.packing` rows hold several samples, which
    do not attend to each other.

    All methods may raise RankLostError or MachineError inside a `with` block, if another rank is gone or memory runs
    out, and RuntimeError after `close`.
    """

    def __init__(self, config: Config) -> None:
        """Joins the other ranks, builds the model and loads or draws its weights.

        Raises:
            ConfigError: The configuration does not fit the number of ranks, or another engine is open.
            DataError: Weights or a teacher cannot be loaded.
            MachineError: The device does not exist, the other ranks cannot be reached, or a rank has another
                configuration or belongs to another launch.
        """
        train = checked_config(config).train
        with contextlib.ExitStack() as resources:
            purpose = purpose_of("Engine", config)
            resources.enter_context(deterministic(train.deterministic))
            device = resources.enter_context(joined_distributed(train.device, train.process_group_timeout_s, purpose))
            layout = Layout.from_config(config, dist.get_world_size())
            groups = resources.enter_context(opened_groups(layout, device, train.seed, train.process_group_timeout_s))
            self._groups, self.config = groups, config
            self._objective = Objective.from_config(config.loss, config.model)
            self._sources = agreed(groups, lambda: source_fingerprints(config.loss))
            self._built_step = build_step(config, groups, self._objective, weights_follow=True)
            initialize(self._built_step.model)
            if config.adapter is not None:
                self._base = SharedBase(self._built_step)
                resources.callback(self._base.close)
            self._batches = GlobalBatches(config, groups)
            # until here a failure closes everything that was opened; from here on `close` does
            self._resources = resources.pop_all()
            open_engines.add(self)

    @property
    def rank(self) -> int:
        """Returns the rank of this process, from 0."""
        return self._groups.rank

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self._groups.layout.world_size

    @property
    def device(self) -> torch.device:
        """Returns the device of this rank."""
        return self._groups.device

    @property
    def images(self) -> GivenImages:
        """Returns the reader of images in samples and prompts."""
        return self._batches.images

    def forward(
        self,
        batch: Sequence[Datum],
        entropy: bool = False,
        temperature: float | None = None,
        routed_experts: bool = False,
        likeliest: bool = False,
    ) -> ForwardResult:
        """Returns the log-probability of each token under the current weights; no gradient, no dropout.

        The result takes one all-reduce over all ranks, in addition to those of the forward pass.

        Args:
            batch: Samples of the global batch.
            entropy: Whether to compute the entropy of each distribution, which costs one more all-reduce over
                tensor-parallel ranks for each chunk of tokens, and a pass over the logits.
            temperature: Divisor of the logits, for log-probabilities and entropies of a sampler with that temperature.
                None: `Datum.temperature` of each sample, by default 1.
            routed_experts: Whether to return each token's experts, for `Datum.routed_experts` of later passes; one more
                all-reduce over all ranks for each layer with experts.
            likeliest: Whether to return if greedy decoding would choose each token. One more all-reduce over
                tensor-parallel ranks for each chunk of tokens.

        Raises:
            ConfigError: Routed experts are requested or given, but the model has no experts, or drops tokens.
            DataError: A sample does not fit the configuration.
        """
        requested: dict[FurtherScore, bool] = {"entropy": entropy, "likeliest": likeliest}
        further = tuple(name for name, is_requested in requested.items() if is_requested)
        query = AskedScores(further, temperature, routed_experts)
        return token_scores(batch, query, self._built().model, self._batches)

    def scores(self, batch: Sequence[Datum]) -> list[float]:
        """Returns the scores that a preference loss compares, for `GroupMember.reference`; no gradient, no dropout.

        Args:
            batch: Samples of the global batch, each with a `member`.

        Returns:
            Score of each sample, on every rank: the sum of the log-probabilities of its weighted tokens, in nats, or
            their mean if loss.aggregation=seq-mean-token-mean; for a reward model the reward.
        """
        return scores_of_samples(batch, self._built().model, self._batches)

    def forward_backward(
        self,
        batch: Sequence[Datum],
        loss: AnyLoss | str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Accumulates the undivided gradient of a batch; several calls can form one step.

        Numerators and denominators are summed as well, and `optim_step` divides once: calls with parts of a batch are
        equivalent to one call with all of it, bit for bit if the microbatches are the same (parts of a multiple of dp x
        micro_batch_size samples). Nothing is reduced over data-parallel ranks, and the host does not wait.

        Args:
            batch: Samples of the global batch.
            loss: Loss instead of `loss.function`: a name, as for that key, or a function TermInputs -> LossPair that
                meets the contract of docs/extending/loss.md. Weights follow `loss.aggregation`. None: the loss of the
                configuration.
            options: Options of the loss, as in `loss.options`.

        Raises:
            ConfigError: The loss function is not known, does not accept the options, breaks its contract or lacks its
                teacher; or this is a second call, and terms with separate denominators need the whole batch in the
                first one.
            DataError: A sample does not fit the configuration, or lacks an extra that the loss needs. The gradients of
                earlier calls remain, unless the error occurs during the pass.
            NumericError: An extra is not finite; the gradients of earlier calls remain.
        """
        training = self._built().training
        if self._is_bare:
            raise RuntimeError("forward_backward inside adapters_off has nothing to train; call it after the block")
        has_temperatures = any(datum.temperature is not None for datum in checked_batch(batch))
        objective = replace(
            self._objective_of(loss, options), has_temperatures=has_temperatures, choices=named_choices(batch)
        )
        _, plan, microbatches = self._batches.split(batch, objective.extras, has_first=self._open is None)
        step, self._open = self._open or training.open(), None  # a failed pass must not leave half a gradient
        training.accumulate(step, microbatches, plan.num_microbatches, objective, is_last=False)
        self._open = step
        self._tokens += sum(len(datum.input_ids) - 1 for datum in batch)

    def optim_step(self, lr: float | None = None, options: AdamOptions | None = None) -> StepResult:
        """Sums gradients over all ranks, divides them once by the global denominator, clips and updates.

        Args:
            lr: Learning rate; None: that of the schedule in `optimizer.*`.
            options: Options of AdamW from this step on; None: unchanged, initially those of `optimizer.*`.

        Raises:
            ConfigError: Options are given, but the optimizer is Muon.
            NumericError: A loss, a denominator or the gradient norm is not finite or impossible; raised on all ranks.
                The gradients are lost, the weights unchanged.
            RuntimeError: No `forward_backward` was called since the last step.
            ValueError: An update with this learning rate and these options could leave the range of float32. The
                gradients remain.
        """
        training = self._built().training
        if self._open is None:
            raise RuntimeError("optim_step needs a forward_backward before it")
        if options is not None:
            self._built().model.optimizer.use(options)
        rate = learning_rate(self.step, self.config.optimizer, self.config.train.num_steps) if lr is None else lr
        self._built().model.optimizer.check_rate(rate)
        step, self._open = self._open, None
        tokens, self._tokens = self._tokens, 0
        totals = training.reduce(step)
        update = training.update(totals, rate)
        self.step += 1
        self._total_tokens += tokens
        return StepResult.of(totals, update, self.step, rate, tokens)

    def evaluate(
        self,
        batches: Iterable[Sequence[Datum]],
        loss: AnyLoss | str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> EvalResult:
        """Returns the loss over some data, forward only: one sum over one sum, however the data are split into batches.

        Args:
            batches: Global batches of any size; read once, `train.global_batch_size` samples at a time.
            loss: Loss instead of `loss.function`, as for `forward_backward`.
            options: Options of the loss.

        Raises:
            NumericError, ConfigError, DataError: As for `forward_backward` and `optim_step`.
        """
        built = self._built()
        # data are read only once, so every sample gets a temperature, by default 1, and room for routed experts, by
        # default those that the router chooses
        choices = tuple(choice_shapes(self.config.model))
        objective = replace(self._objective_of(loss, options), has_temperatures=True, choices=choices)
        totals = forward_totals(built.model, objective, self._batches.passes(batches, objective.extras), built.teacher)
        return EvalResult.of(totals.terms, totals.diagnostics)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        max_sequences: int = 64,
        routed_experts: bool = False,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> list[Completion]:
        """Generates an answer to each prompt with the current weights, with its log-probabilities; no dropout.

        Neither the layout nor the other prompts change an answer: a token is drawn from the seed, the number of its
        prompt and its position. Repeat a prompt to draw several answers to it.

        Args:
            prompts: Token ids of each prompt, the same on all ranks; at least one token each.
            sampling: Rules for drawing tokens and ending an answer. None: SamplingParams().
            max_sequences: Most answers in progress on a data-parallel or context-parallel rank, for which the key/value
                cache is allocated.
            routed_experts: Whether to return each token's experts, for `Datum.routed_experts`.
            images: Images of each prompt, as in `Datum.images`; its token ids have all tokens of each image. None: no
                prompt has any.

        Returns:
            Answer to each prompt, on every rank.

        Raises:
            ConfigError: The model's layers cannot generate, or routed experts are requested of a model without experts.
            DataError: An image cannot be read, or a prompt does not have its tokens.
            NumericError: The logits are not finite.
            ValueError: A prompt is empty, or contains a number that is not an id of the vocabulary.
        """
        model = self._built().model
        model.sharded.gather_parameters()
        given = self._batches.images.of_prompts(prompts, images)
        return generate(model, prompts, sampling, max_sequences, routed_experts, given)

    def save(self, run_dir: Path | str | None = None) -> Path:
        """Saves weights, optimizer and step, complete when this returns.

        Args:
            run_dir: Run folder that all ranks can see. It gets `checkpoints/` and `config.yaml`, like a run of `mtrain
                train`, so that every command of mtrain can use it; nothing in it is deleted. None: `run.dir`.

        Returns:
            Path of the checkpoint, such as `run_dir/checkpoints/step_00000010`.

        Raises:
            DataError: The newest checkpoint of the folder was trained with another teacher, or another source of the
                user's loss, without the consent of `checkpoint.allow_changed`.
            RunFolderError: The folder already has this step or a run of another configuration, or is in use.
            MachineError: The disk is full or cannot be written.
            NumericError: A weight is not finite; nothing was saved.
        """
        folder = RunFolder(Path(self.config.run.dir if run_dir is None else run_dir))
        return save_at(folder, Progress(self.step, self._total_tokens), self._built().model, self._inputs())

    def load(self, path: Path | str) -> None:
        """Loads weights, optimizer and step of a checkpoint saved under any layout. Gradients are dropped.

        Args:
            path: Checkpoint, or run folder, whose newest good checkpoint is loaded.

        Raises:
            DataError: The checkpoint was trained with another teacher, or another source of the user's loss, without
                the consent of `checkpoint.allow_changed`; or it is damaged, belongs to another model, or contains nan
                or inf, and then the engine must no longer be used.
        """
        model, inputs = self._built().model, self._inputs()
        # accumulated gradients belong to the old weights
        self._open, self._tokens = None, 0
        self.step, self._total_tokens, *_ = load_from(Path(path), model, inputs)

    def _inputs(self) -> dict[str, str]:
        """Returns the fingerprints of inputs that decide results besides samples and weights, by configuration key."""
        return {**self._sources, **of_teacher(self._built().teacher)}

    def export_hf(self, folder: Path | str) -> None:
        """Writes a folder that Hugging Face's libraries can load, and verifies that it holds exactly these weights.

        A checkpoint is written next to it first and deleted afterwards, so that no rank ever holds the whole model; the
        disk must have room for both.

        Args:
            folder: Path of the new folder, which all ranks can see; must not exist.

        Raises:
            ConfigError: The folder exists.
            DataError: No Hugging Face family can describe the model.
            MachineError: The disk is full or cannot be written.
        """
        exported_through_checkpoint(Path(folder), self.save)

    def named_hf_tensors(
        self, content: HfContent = "merged", everywhere: bool = True, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the current weights as whole tensors under Hugging Face's names, for an inference engine; no disk.

        The tensors are bit for bit those of `export_hf`, in the order of the model; a table that a folder has under two
        names is yielded once. (With adapters on a GPU, the sum with the frozen matrix is rounded on the GPU; an export
        rounds it on the CPU.) Tensors are on the engine's device, in the precision of the run, and the caller may keep
        them.

        Every rank must iterate to the end, and must not call another method of the engine meanwhile: tensors are
        gathered during the iteration, a bucket at a time, by one broadcast from each rank that has a part of it.

        Args:
            content: Weights of a model with adapters: "merged", "base" for the frozen model, or "adapter" for the
                adapters under PEFT's names, the only weights that change.
            everywhere: Whether every rank gets the tensors; if not, only rank 0 does, and others iterate over nothing.
            bucket_bytes: Size of the tensors that are gathered together; a receiving rank needs about three times as
                much memory.

        Raises:
            ConfigError: The model has no adapters to yield.
            DataError: No Hugging Face family can describe the model.
        """
        return self._hf_tensors(content).stream(bucket_bytes, everywhere)

    def broadcast_hf_tensors(
        self, group: dist.ProcessGroup | None, content: HfContent = "merged", bucket_bytes: int = BUCKET_BYTES
    ) -> int:
        """Sends the tensors of `named_hf_tensors` to other processes, which call `receive_hf_tensors`.

        A description of all buckets is sent first, then one broadcast per bucket.

        Args:
            group: Group of rank 0 and the receivers on rank 0, with a backend that sends from the engine's device; it
                need not be part of the default process group. None on the other ranks.
            content: Weights to send, as for `named_hf_tensors`.
            bucket_bytes: Size as for `named_hf_tensors`.

        Returns:
            Number of bytes sent.

        Raises:
            ConfigError: Rank 0 has no group, or the model has no adapters to send.
            DataError: No Hugging Face family can describe the model.
        """
        on_first_rank(lambda: need_group(group))
        return self._hf_tensors(content).send(bucket_bytes, group if self.rank == 0 else None)

    def weight_deltas(
        self, content: HfContent = "merged", dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> WeightDeltas:
        """Returns a sender of `named_hf_tensors` that sends only what has changed since the last sync.

        Args:
            content: Weights to send, as for `named_hf_tensors`.
            dtype: Dtype in which the receiver computes; tensors in the run's precision are rounded to it, and a change
                that rounding hides is not sent. None: no rounding.
            bucket_bytes: Size as for `named_hf_tensors`.

        Raises:
            ConfigError, DataError: As for `named_hf_tensors`.
        """
        self._hf_tensors(content, dtype)  # plans once, so that errors are raised here
        return WeightDeltas(lambda: self._hf_tensors(content, dtype), bucket_bytes, self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._let_go()
        self._resources.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        model, state = self.config.model, "closed" if self._built_step is None else f"step {self.step}"
        location = f"layout {self._groups.layout}, rank {self.rank} of {self.world_size} on {self.device}"
        return (
            f"<Engine: {num_parameters(model):,} parameters in {counted(model.num_layers, 'layer')}; {location}; "
            f"{state}>"
        )

    def _hf_tensors(self, content: HfContent, dtype: torch.dtype | None = None) -> HfTensors:
        return HfTensors(self._built().model, content, dtype)

    def _objective_of(self, loss: AnyLoss | str | None, options: Mapping[str, Any] | None) -> Objective:
        if loss is None and options is None:
            return self._objective
        # options without a loss apply to the configuration's function
        return self._objective.with_main(self.config.loss.function if loss is None else loss, self.config.loss, options)
