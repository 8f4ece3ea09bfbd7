"""Rollouts for examples/grpo_loop.py: by vLLM (0.32) in the trainer's processes, or by the engine without vLLM."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from mtrain import Completion, Engine, SamplingParams, WeightCopy

Draw = Callable[[list[list[int]], SamplingParams], list[Completion]]


@contextlib.contextmanager
def drawing(engine: Engine) -> Iterator[Draw]:
    """Yields a function that draws answers with the current weights; collective, the same answers on all ranks."""
    if importlib.util.find_spec("vllm") is None:
        yield functools.partial(engine.generate, max_sequences=256)
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its worker is in this process and can get tensors
    vllm: Any = importlib.import_module("vllm")
    Path(engine.config.run.dir).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=engine.config.run.dir) as folder:
        folders = [f"{folder}/model"]
        dist.broadcast_object_list(folders, src=0)
        engine.export_hf(folders[0])  # for its config.json
        settings: dict[str, Any] = {"tensor_parallel_size": engine.world_size, "enforce_eager": True}
        settings["distributed_executor_backend"] = "external_launcher" if engine.world_size > 1 else "uni"
        settings["gpu_memory_utilization"] = 0.3  # the trainer is on the same GPU
        settings["dtype"] = {"fp32": "float32", "bf16": "bfloat16"}[engine.config.train.precision]  # else half for both
        settings["hf_overrides"] = {"max_position_embeddings": engine.config.data.seq_length + 1}  # for the last token
        llm = vllm.LLM(folders[0], skip_tokenizer_init=True, **settings)
        deltas, copy = engine.weight_deltas(), WeightCopy()

        def draw(prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
            if [copy.apply(part) for part in deltas.parts(everywhere=True)]:  # changes since the last call
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copy.tensors.items()})
                llm.reset_prefix_cache()  # it has keys and values of the old weights
            asked: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
            asked |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "stop_token_ids": [*sampling.stop_token_ids]}
            asked |= {"logprobs": 0, "ignore_eos": True, "detokenize": False}  # 0 besides that of the drawn token
            seeds = [sampling.seed * len(prompts) + number for number in range(len(prompts))]  # a prompt may come twice
            each = [vllm.SamplingParams(seed=seed, **asked) for seed in seeds]
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            return [_completion(output.outputs[0]) for output in llm.generate(given, each, use_tqdm=False)]

        yield draw
        llm.llm_engine.engine_core.shutdown()  # also closes torch.distributed: only Engine.close may follow


def _completion(found: Any) -> Completion:
    log_probs = [place[token].logprob for token, place in zip(found.token_ids, found.logprobs, strict=True)]
    return Completion([*found.token_ids], log_probs, found.finish_reason)
