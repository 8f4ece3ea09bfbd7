"""The part of vLLM 0.32's offline API that examples/vllm_rollouts.py uses, built on transformers: names, kinds of
parameters and defaults are those of vllm/entrypoints/llm.py and vllm/sampling_params.py. It requires of its caller what
vLLM requires: the worker in this process, and cached keys and values of old weights dropped before the next answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

made: list[LLM] = []
"""Models that this process has made."""


@dataclass
class SamplingParams:
    """Refuses unknown names, like the real one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    token_ids: Sequence[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        distributed_executor_backend: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        hf_overrides: dict[str, Any] | None = None,
    ) -> None:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert skip_tokenizer_init, "the folder has no tokenizer"
        assert distributed_executor_backend == ("uni" if tensor_parallel_size == 1 else "external_launcher")
        assert tensor_parallel_size == dist.get_world_size(), "an external launcher's ranks are all in use"
        assert 0 < gpu_memory_utilization < 0.5, "the trainer needs a part"
        assert enforce_eager
        # "auto" takes half precision for a model in float32, and answers end where the context does
        kind = torch.float32 if dtype == "float32" else torch.bfloat16
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=kind)
        longest = (hf_overrides or {}).get("max_position_embeddings", self._model.config.max_position_embeddings)
        self._length = max_model_len or longest
        assert self._length <= longest, "vLLM refuses a context that is longer than that of the model"
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self._is_stale = False
        self.num_updates = 0
        made.append(self)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        assert (method, args) == ("reload_weights", ())
        self._reload_weights(**(kwargs or {}))
        return [None]

    def _reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = {name for name, _ in self._model.named_parameters()}
        for name, tensor in weights_iterator:
            self._model.get_parameter(name).data.copy_(tensor)
            missing.remove(name)
        assert not missing
        self._is_stale = True
        self.num_updates += 1

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._is_stale = False
        return True

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        assert not self._is_stale, "the prefix cache is of other weights"
        pairs = zip(prompts, sampling_params, strict=True)
        return [RequestOutput([self._answer(prompt["prompt_token_ids"], how)]) for prompt, how in pairs]

    @torch.no_grad()
    def _answer(self, prompt: list[int], how: SamplingParams) -> CompletionOutput:
        assert (how.temperature, how.top_p, how.top_k, how.logprobs) == (1.0, 1.0, 0, 0), "all that is tested"
        assert how.ignore_eos
        assert not how.detokenize
        assert how.seed is not None
        assert how.max_tokens is not None
        random = torch.Generator().manual_seed(how.seed)
        ids, found = list(prompt), []
        for _ in range(min(how.max_tokens, self._length - len(prompt))):
            logs = self._model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            ids.append(int(torch.multinomial(logs.exp(), 1, generator=random)))
            found.append({ids[-1]: Logprob(float(logs[ids[-1]]), rank=1)})
            if ids[-1] in (how.stop_token_ids or []):
                return CompletionOutput(0, ids[len(prompt) :], found, "stop")
        return CompletionOutput(0, ids[len(prompt) :], found, "length")
