"""Logits and training steps by transformers and torch, in one process, without Megatron-Core.

The model computes in float32, the loss and its gradient by the logits in float64: float32 rounds sums over a large
vocabulary, and the losses of likely tokens, by more than the comparison allows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import MachineError
from mtrain.config.schema.train import AdamWSection
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.registry import family_of
from mtrain.hf.tokenizer.tokenizer import NO_TOKENS, AddedTokens


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Computes logits [batch, seq, vocab_size] of tokens [batch, seq] in float32 on the CPU."""
    logits: Tensor = open_model(folder)(tokens).logits
    return logits.float()


def open_model(folder: Path) -> Any:
    """Opens a folder's model in transformers: float32, CPU, no dropout; no code of the folder runs.

    Raises:
        MachineError: transformers is not installed.
    """
    try:
        # here, because it takes seconds and most commands do not need it
        import transformers
    except ModuleNotFoundError:
        raise MachineError(
            "this needs transformers, which is not installed; pip install 'transformers>=5,<6'"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    known = getattr(transformers, family_of(read_json(folder / CONFIG_NAME)).architecture)
    # by transformers, which writes infinity in its own form
    said, _ = known.config_class.get_config_dict(folder, local_files_only=True)
    # under the class's own name: transformers knows Kimi-K2 only by code of the folder
    config = known.config_class.from_dict({**said, "model_type": known.config_class.model_type})
    # eager: fused attention rounds otherwise and differs by version, and grouped experts need rows of whole 16 bytes;
    # local files only: missing ones would be fetched
    return known.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        trust_remote_code=False,
        local_files_only=True,
    ).eval()


_MOST_WIDE = 2**24
"""Most float64 logits at once: 128 MiB, and as much for each step of the arithmetic."""


class TrainingRows(NamedTuple):
    """Rows that pass the model together."""

    tokens: Tensor
    """[batch, seq] int64 token ids; each row is one document with causal attention."""
    labels: Tensor
    """[batch, seq] int64, shifted: the token to predict at each position."""
    weights: Tensor
    """[batch, seq]: factor of each token's loss; 0 leaves it out."""


class StepInput(NamedTuple):
    rows: Sequence[TrainingRows]
    denominator: float
    """Divisor of the weighted sum of token losses; 0: nothing to learn."""
    lr: float


class StepFound(NamedTuple):
    numerator: float
    """Weighted sum of token losses, in nats."""
    grad_norm: float
    """Global L2 norm before clipping; 0 if there was nothing to learn."""


class TrainableModel(NamedTuple):
    model: Any
    padding_row: int | None
    """Row of `pad_token_id` in the embedding, whose gradient transformers would omit; None if there is none."""


def open_trainable(folder: Path, added: AddedTokens = NO_TOKENS, dtypes: Sequence[torch.dtype] = ()) -> TrainableModel:
    """Opens the model of a folder so that all of its rows are trained.

    A token that pads elsewhere (SmolLM2's <|im_end|>) may be text here, because nothing is padded; its row then has a
    gradient, as in an output layer that shares the table.

    Args:
        folder: Folder with config.json and safetensors.
        added: Tokens that get their own rows, by transformers' tokenizer and `resize_token_embeddings`.
        dtypes: Stored dtypes of the embedding and of an untied output layer; needed if tokens are added.
    """
    model = open_model(folder)
    if any(added):
        _add_rows(model, folder, added, dtypes)
    table = model.get_input_embeddings()
    row, table.padding_idx = getattr(table, "padding_idx", None), None
    return TrainableModel(model, row)


@torch.no_grad()
def _add_rows(model: Any, folder: Path, added: AddedTokens, dtypes: Sequence[torch.dtype]) -> None:
    """Gives added tokens the mean of the rows before them, around which transformers draws them; unused rows come
    first."""
    import transformers  # as in open_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    num_rows = model.get_input_embeddings().weight.shape[0]
    for texts, special in ((added.plain, False), (added.special, True)):
        tokenizer.add_tokens(list(texts), special_tokens=special)
    ids = tokenizer.convert_tokens_to_ids([*added.plain, *added.special])
    first, end = min(*ids, num_rows), max(ids) + 1  # a tokenizer may have tokens without a row
    model.resize_token_embeddings(max(num_rows, end), mean_resizing=False)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    for table, dtype in zip(tables[: 1 if tables[0] is tables[1] else 2], dtypes, strict=True):
        table[first:end] = table[:first].double().mean(0).to(dtype).to(table.dtype)


def transformers_steps(model: Any, section: AdamWSection, steps: Iterable[StepInput]) -> Iterator[StepFound]:
    """Runs AdamW steps and yields their results; adds the gradients of a step row by row.

    Args:
        model: Model of transformers, trained in place.
        section: Constants of AdamW and clipping.
    """
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        list(_groups(parameters, section)), lr=0.0, betas=(section.beta1, section.beta2), eps=section.epsilon
    )
    for step in steps:
        optimizer.zero_grad()
        # gradients of all rows add up in .grad before the one optimizer step; fsum adds the losses exactly
        numerator = math.fsum(_backward(model, rows, step.denominator) for rows in step.rows)
        gradients = [value.grad for value in parameters.values() if value.grad is not None]
        # in float64, because float32 sums of millions of squares are too inexact to compare
        norms = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients]
        norm = math.sqrt(math.fsum(each**2 for each in norms))
        # an empty batch moves neither weights nor moments, and AdamW's own counter stays
        if step.denominator != 0:
            if section.clip_grad > 0:
                # clip_grad_norm_ would compute its own norm in float32
                torch.nn.utils.clip_grads_with_norm_(parameters.values(), section.clip_grad, torch.tensor(norm))
            for group in optimizer.param_groups:
                group["lr"] = step.lr
            optimizer.step()
        yield StepFound(numerator, norm)


def _groups(parameters: dict[str, Any], section: AdamWSection) -> Iterator[dict[str, Any]]:
    """Yields two parameter groups: matrices decay; norms and biases as the section says."""
    # transformers 5 stacks experts, so their biases are matrices: they are recognised by name
    small = {name for name, value in parameters.items() if value.dim() < 2 or name.endswith("bias")}
    decay = section.weight_decay
    yield {"params": [value for name, value in parameters.items() if name not in small], "weight_decay": decay}
    other = decay if section.decay_norms_and_biases else 0.0
    yield {"params": [value for name, value in parameters.items() if name in small], "weight_decay": other}


def _backward(model: Any, rows: TrainingRows, denominator: float) -> float:
    # [batch, seq, vocab_size]; no cache, which would only take memory
    logits = model(rows.tokens, use_cache=False).logits
    # divided before backward, unlike in training, so the comparison proves that order as well
    numerator, gradient = _loss(logits.detach().flatten(0, 1), rows, denominator)
    if denominator != 0:
        logits.backward(gradient.view_as(logits))
    return numerator


def _loss(logits: Tensor, rows: TrainingRows, denominator: float) -> tuple[float, Tensor]:
    """Computes the weighted sum of losses, and the gradient of its quotient by the logits [tokens, vocab_size]."""
    labels, weights = rows.labels.flatten(), rows.weights.flatten().double()
    gradient, losses = torch.zeros_like(logits), []
    # a few tokens at a time: float64 of all logits would be the largest tensors of the check
    size = max(1, _MOST_WIDE // logits.shape[1])
    for start in range(0, len(logits), size):
        own = slice(start, start + size)
        log_probs = logits[own].double().log_softmax(-1)
        likely, weight = log_probs.gather(1, labels[own, None]), weights[own, None]
        # where, not a product: the loss of a masked token may be inf
        losses.append(float(torch.where(weight > 0, -likely * weight, 0.0).sum()))
        if denominator != 0:
            change = log_probs.exp_().scatter_add_(1, labels[own, None], torch.full_like(likely, -1.0))
            gradient[own] = torch.where(weight > 0, change * (weight / denominator), 0.0).to(logits.dtype)
    return math.fsum(losses), gradient
