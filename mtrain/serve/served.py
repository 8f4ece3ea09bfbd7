"""The model that a service offers: its name, adapters and sampling rules for clients; no torch."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mtrain.arch.adapters import all_matrices
from mtrain.base.errors import ConfigError, DataError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.schema.adapter import GROUPS, AdapterSection, LoraSection, Target
from mtrain.config.schema.model import ModelSection
from mtrain.serve.operations import Lora, Sample, SampleBody
from mtrain.training.sampling.params import SamplingParams

_ALPHA = 32.0
"""Numerator of the adapters' scale if the configuration gives none, for adapters of any rank."""
_MOST_NUMBERS = 2**26
"""Most tokens and log-probabilities of an answer: a few gigabytes while they are collected."""


def _requested_targets(lora: Lora) -> list[Target]:
    attention: tuple[Target, ...] = ("qkv", "proj", "in_proj", "out_proj") if lora.train_attn else ()
    mlp: tuple[Target, ...] = ("fc1", "fc2", "experts") if lora.train_mlp else ()
    output: tuple[Target, ...] = ("output",) if lora.train_unembed else ()
    return [*attention, *mlp, *output]


def _targets(lora: Lora, model: ModelSection) -> list[Target]:
    """Returns those modules that a client names and the model has."""
    named = _requested_targets(lora)
    every = LoraSection(targets=tuple(named or ("qkv",)))
    parts = {matrix.part for matrix in all_matrices(model, every)}
    return [target for target in named if parts.intersection(GROUPS.get(target, (target,)))]


@dataclass(frozen=True)
class Served:
    """The model that a service offers."""

    config: Config
    """Configuration, whose adapter section gives the scale of adapters."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer by default."""

    @property
    def name(self) -> str:
        return Path(self.config.run.dir if self.config.model.hf is None else self.config.model.hf).name

    @property
    def tokenizer(self) -> Path | None:
        """Returns the path of the tokenizer, for texts that end an answer; None if no key names one."""
        if self.config.data.tokenizer is not None:
            return Path(self.config.data.tokenizer)
        hf = self.config.model.hf
        has_one = hf is not None and any(list(Path(hf).glob(pattern)) for pattern in ("tokenizer.json", "*.model"))
        return Path(hf) if hf is not None and has_one else None

    def is_called(self, name: str) -> bool:
        """Says whether a client means this model: by its name, or as OWNER/NAME, as on the hub."""
        return name.count("/") <= 1 and name.rpartition("/")[2] == self.name

    def check_name(self, name: str) -> None:
        if not self.is_called(name):
            raise DataError(f"base_model={name[:200]!r} is not served here; take {self.name}")

    def completed_adapter(self, lora: Lora | None) -> Lora:
        """Returns a client's adapter with a seed. `train_unembed`, the SDK's default, is dropped if the output layer
        shares the embedding table, since an adapter on it would train nothing."""
        adapter = Lora(rank=0) if lora is None else lora
        seed = secrets.randbits(48) if adapter.rank and adapter.seed is None else adapter.seed
        has_output = adapter.train_unembed and not self.config.model.tied_embeddings
        return adapter.model_copy(update={"seed": seed, "train_unembed": has_output})

    def adapted(self, lora: Lora) -> Config:
        """Returns the configuration with a client's adapter; with `adapter.path` set, the client must request the
        adapter of that folder."""
        content, config, start = self.config.model_dump(), self.config, self.config.adapter
        if start is not None and start.path is not None:
            named = _requested_targets(lora)
            if lora.rank != start.rank or not start.parts.issubset(p for t in named for p in GROUPS.get(t, (t,))):
                raise ConfigError(
                    f"rank={lora.rank} on {', '.join(named) or 'nothing'} was requested, but models of this service "
                    f"start from {shown(start)} (adapter.path); request that rank, and at least these modules"
                )
            return config
        if lora.rank == 0:
            content["adapter"] = None
            return Config.model_validate(content)
        targets = _targets(lora, config.model)
        if not targets:
            raise ConfigError(
                "no part of this model would be trained; set train_attn or train_mlp, or rank=0 for the whole model"
            )
        matrices = all_matrices(config.model, LoraSection(targets=tuple(targets)))
        most = max(max(matrix.rows, matrix.columns) for matrix in matrices)
        if lora.rank > most:
            raise ConfigError(
                f"rank={lora.rank} is larger than each of the matrices that it would adapt; take at most {most}"
            )
        section = {"kind": "lora", "alpha": _ALPHA} if config.adapter is None else config.adapter.model_dump()
        content["adapter"] = {**section, "rank": lora.rank, "targets": targets, "rank_pattern": {}, "alpha_pattern": {}}
        try:
            return Config.model_validate(content)
        except ValidationError as fault:
            reasons = "; ".join(error["msg"].removeprefix("Value error, ") for error in fault.errors())
            raise ConfigError(
                f"this model cannot have an adapter of rank {lora.rank} on {', '.join(targets)}: {reasons}"
            ) from None

    def most_new_tokens(self, body: SampleBody, length: int) -> int:
        """Returns the most tokens of each answer to a prompt of `length` tokens; refuses requests for too much."""
        last_n, most_sampled = body.prompt_logprobs_last_n, body.sampling_params.max_tokens
        room = self.config.data.seq_length - length
        if room < 1 or length < 1:
            raise DataError(f"the prompt has {counted(length, 'token')}; send 1 to {self.config.data.seq_length - 1}")
        if last_n is not None and not (body.prompt_logprobs and last_n < length):
            raise DataError(
                f"prompt_logprobs_last_n={last_n} needs prompt_logprobs and a longer prompt than "
                f"{counted(length, 'token')}; send both"
            )
        most = room if most_sampled is None else min(most_sampled, room)
        numbers = body.num_samples * (length + most * (2 + 2 * body.topk_sample_logprobs))
        if numbers > _MOST_NUMBERS:
            raise DataError(
                f"num_samples={body.num_samples} of {counted(most, 'token')} with "
                f"topk_sample_logprobs={body.topk_sample_logprobs} are {numbers} numbers; request fewer in one call, "
                f"at most {_MOST_NUMBERS}"
            )
        return most

    def sample(self, body: SampleBody) -> Sample:
        """Returns the operation for a request; refuses requests that the model or the service cannot serve."""
        params, prompt = body.sampling_params, body.prompt.parts
        if prompt.images and self.config.model.vision is None:
            raise DataError("the prompt has an image, but this model reads text; send tokens")
        # the engine, which counts the tokens of images, replaces the 1
        most = 1 if prompt.images else self.most_new_tokens(body, len(prompt.tokens))
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        texts = tuple(stop for stop in stops or [] if isinstance(stop, str))
        if texts and self.tokenizer is None:
            raise DataError("stop is a text, but this service has no tokenizer; give ids, or set data.tokenizer for it")
        # as in other engines, stop texts are in addition to the end tokens
        ids = self.stop_token_ids if stops is None or texts else frozenset(map(int, stops))
        sampling = SamplingParams(
            most,
            params.temperature,
            params.top_p,
            max(0, params.top_k),  # -1 also means all
            secrets.randbits(48) if params.seed is None else params.seed,
            ids,
            num_likeliest=body.topk_sample_logprobs,
            log_probs_of_draw=True,  # a client expects those of the policy that it sampled from
        )
        return Sample(body, sampling, texts)


def shown(adapter: AdapterSection | None) -> str:
    return "no adapters" if adapter is None else f"adapters of rank {adapter.rank} on {', '.join(adapter.targets)}"
