"""Inference engine for tests: transformers in float32, with a fault of its own if one is wanted.

It shares no code with `mtrain verify rollout`: prompts are rendered by transformers, and every fault is written here.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoTokenizer

from tests.hf.folders import save

WORDS = ["<unk>", "<s>", "</s>", "<end>", "system", "user", "assistant", *(f"w{number}" for number in range(50))]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }} <end>{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
QUESTIONS = [
    [{"role": "system", "content": "w40 w41"}, {"role": "user", "content": f"w{number} w7 w{3 * number}"}]
    for number in range(4)
]
NUM_TOKENS = 12


def save_model(folder: Path, name: str, **changes: Any) -> Any:
    """Writes a small model with a tokenizer of words and a chat template, and returns it in float32."""
    model = save(name, folder, dtype=torch.float32, vocab_size=len(WORDS), **changes)
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


def prompt_ids(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    """Renders messages and the beginning of an answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


@torch.no_grad()
def answer(model: Any, prompt: list[int], seed: int, temperature: float = 1.0) -> list[int]:
    """Draws an answer."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while len(ids) < NUM_TOKENS:
        logits = model(torch.tensor([prompt + ids])).logits[0, -1] / temperature
        ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return ids


@torch.no_grad()
def log_probs(
    model: Any, prompt: list[int], ids: list[int], change: Callable[[Tensor], Tensor] = lambda logits: logits
) -> list[float]:
    """Computes the log-probability of each token of an answer.

    Args:
        model: Model of transformers.
        prompt: Token ids that are read before the answer.
        ids: Token ids of the answer.
        change: Function of the logits, [tokens, vocab].
    """
    logits = change(model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1])
    return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


def top_k(count: int) -> Callable[[Tensor], Tensor]:
    """Leaves the likeliest tokens alone."""

    def change(logits: Tensor) -> Tensor:
        least = logits.topk(count, -1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)

    return change


def top_p(probability: float) -> Callable[[Tensor], Tensor]:
    """Leaves the nucleus alone, as vLLM masks it: ascending, where the sum so far is at most 1 - p."""

    def change(logits: Tensor) -> Tensor:
        ordered, places = logits.sort(-1)
        gone = ordered.softmax(-1).cumsum(-1) <= 1 - probability
        gone[:, -1] = False
        return logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -torch.inf)

    return change


@contextmanager
def bfloat16_routers(model: Any) -> Iterator[None]:
    """Computes the logits of routers in bfloat16, and their softmax in float32, as inference engines do."""
    gates = [layer.mlp.gate for layer in model.model.layers]

    def forward_of(gate: Any) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows = hidden.reshape(-1, gate.hidden_dim)
            logits = F.linear(rows.bfloat16(), gate.weight.bfloat16()).float()
            weights, chosen = logits.softmax(-1).topk(gate.top_k, -1)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    for gate in gates:
        gate.forward = forward_of(gate)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


@contextmanager
def expert_sums(model: Any, num_ranks: int) -> Iterator[None]:
    """Adds up the experts of each rank, rounds the sum to bfloat16 and adds up the ranks."""
    every = [layer.mlp.experts for layer in model.model.layers]

    def forward_of(experts: Any) -> Callable[..., Tensor]:
        whole, of_rank = type(experts).forward, experts.num_experts // num_ranks

        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            parts = [
                whole(experts, hidden, chosen, weights * (chosen // of_rank == rank)).bfloat16().float()
                for rank in range(num_ranks)
            ]
            return torch.stack(parts).sum(0)

        return forward

    for experts in every:
        experts.forward = forward_of(experts)
    try:
        yield
    finally:
        for experts in every:
            del experts.forward


@contextmanager
def recorded_routes(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list that gets the choices of each layer's router, [tokens, k]."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, given, result: found.append(result[2]))
        for layer in model.model.layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def forced_routes(model: Any) -> Iterator[list[Tensor]]:
    """Lets each router take the next expert in place of its best; yields a list that gets its choices, [tokens, k]."""
    gates = [layer.mlp.gate for layer in model.model.layers]
    found: list[Tensor] = []

    def forward_of(gate: Any) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            chosen = logits.topk(gate.top_k + 1, -1).indices[:, 1:]
            found.append(chosen)
            return logits, logits.gather(-1, chosen).softmax(-1), chosen

        return forward

    for gate in gates:
        gate.forward = forward_of(gate)
    try:
        yield found
    finally:
        for gate in gates:
            del gate.forward
