"""Computes logits and training steps with transformers and torch, in one process, without Megatron-Core.

The model computes in float32, but the loss and its gradient with respect to the logits in float64: float32 rounds sums
over a large vocabulary, and the losses of likely tokens, by more than the comparison allows.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import MachineError
from mtrain.config.schema.train import AdamWSection
from mtrain.config.schema.vision import TrainedTower, VisionSection
from mtrain.config.towers import TOWERS, description_of
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.registry import family_of
from mtrain.hf.tokenizer.tokenizer import NO_TOKENS, AddedTokens


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Computes logits [batch, seq, vocab_size] of tokens [batch, seq] in float32 on the CPU."""
    logits: Tensor = open_model(folder)(tokens).logits
    return logits.float()


def open_model(folder: Path) -> Any:
    """Opens a folder's model in transformers, in float32 on the CPU, without dropout; runs no code of the folder.

    Raises:
        MachineError: transformers is not installed.
    """
    try:
        # imported here, because it takes seconds and most commands do not need it
        import transformers
    except ModuleNotFoundError:
        raise MachineError(
            "this needs transformers, which is not installed; run pip install 'transformers>=5,<6'"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, family_of(read_json(folder / CONFIG_NAME)).architecture)
    # transformers reads the file, because it writes infinity in its own form
    content, _ = model_class.config_class.get_config_dict(folder, local_files_only=True)
    # under the class's own name, because transformers knows the name of Kimi-K2 only from code in the folder
    config = model_class.config_class.from_dict({**content, "model_type": model_class.config_class.model_type})
    # eager, because fused attention rounds differently in each version, and grouped experts need rows of whole 16
    # bytes; local files only, or transformers would download missing ones
    return model_class.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        trust_remote_code=False,
        local_files_only=True,
    ).eval()


_MOST_WIDE = 2**24
"""Limit on float64 logits at a time: 128 MiB, and as much again for each temporary."""


_OF_IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
"""Outputs of image processors that models of transformers take."""


class TrainingRows(NamedTuple):
    """Rows of one forward pass."""

    tokens: Tensor
    """[batch, seq] int64 token ids; each row is one document."""
    labels: Tensor
    """[batch, seq] int64, the next token at each position."""
    weights: Tensor
    """[batch, seq], factor of each token's loss; 0 ignores the token."""
    images: Mapping[str, Tensor] = MappingProxyType({})
    """Arguments of the model for the images of these rows, as transformers' processor returns them; empty for text."""


class StepInput(NamedTuple):
    rows: Sequence[TrainingRows]
    denominator: float
    """Divisor of the weighted sum of token losses; 0 means nothing to learn."""
    lr: float


class StepFound(NamedTuple):
    numerator: float
    """Weighted sum of token losses, in nats."""
    log_probs: Tensor
    """Log-probability of each label, [tokens] float64, row by row, before the update."""
    grad_norm: float
    """Global L2 norm before clipping; 0 with nothing to learn."""


class TrainableModel(NamedTuple):
    model: Any
    padding_row: int | None
    """Embedding row of `pad_token_id`, whose gradient transformers would omit; None without one."""


def open_trainable(folder: Path, added: AddedTokens = NO_TOKENS, dtypes: Sequence[torch.dtype] = ()) -> TrainableModel:
    """Opens the model of a folder so that all of its embedding rows are trained.

    The padding token (SmolLM2's <|im_end|>) may be text here, because nothing is padded; its row gets a gradient, as in
    an output layer that shares the table.

    Args:
        folder: Folder with config.json and safetensors.
        added: Tokens to add, with transformers' tokenizer and `resize_token_embeddings`.
        dtypes: Dtypes on disk of the embedding and of an untied output layer; needed to add tokens.
    """
    model = open_model(folder)
    if any(added):
        _add_rows(model, folder, added, dtypes)
    table = model.get_input_embeddings()
    row, table.padding_idx = getattr(table, "padding_idx", None), None
    return TrainableModel(model, row)


def parts_of(model: Any, tower: TrainedTower) -> dict[str, str]:
    """Returns the part of each parameter of a multimodal model: tower, projector or language_model."""
    description = TOWERS[tower.kind]
    prefixes = [(theirs, ours) for ours, choices in description.prefixes for theirs in choices]
    parts = {}
    for name, _ in model.named_parameters():
        own = next((ours + name.removeprefix(theirs) for theirs, ours in prefixes if name.startswith(theirs)), None)
        is_projector = own is not None and own.startswith(description.projector)
        parts[name] = "language_model" if own is None else "projector" if is_projector else "tower"
    return parts


def image_inputs(vision: VisionSection, tokens: Tensor, of_images: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the model's arguments for images; there may be none.

    Args:
        tokens: Token ids, [batch, seq].
        of_images: Outputs of transformers' image processor for the images in order; empty for text.
    """
    images = {name: of_images[name] for name in _OF_IMAGES if name in of_images}
    tower = description_of(vision)
    # rows of text need them too, in training, if tokens of images see each other
    if tower.token_types is None or not (images or tower.bidirectional):
        return images
    return {**images, tower.token_types: (tokens == vision.image_token).int()}


@torch.no_grad()
def _add_rows(model: Any, folder: Path, added: AddedTokens, dtypes: Sequence[torch.dtype]) -> None:
    """Initializes the rows of added tokens to the mean of the rows before them, without transformers' noise.

    Added tokens use the table's unused rows first. Tokens of the tokenizer that lack a row get one in the same way.
    """
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


def transformers_steps(
    model: Any, section: AdamWSection, steps: Iterable[StepInput], parts: Mapping[str, str] = MappingProxyType({})
) -> Iterator[StepFound]:
    """Runs AdamW steps and yields their results; accumulates gradients over the rows of a step.

    Args:
        model: Model of transformers, which is trained in place.
        section: Constants of AdamW and clipping.
        parts: Part of each parameter, as `parts_of` returns it, for learning rates of parts; empty for text.
    """
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        list(_groups(parameters, section, parts)), lr=0.0, betas=(section.beta1, section.beta2), eps=section.epsilon
    )
    for step in steps:
        optimizer.zero_grad()
        # .grad accumulates over all rows; fsum adds the losses exactly
        sums, log_probs = zip(*(_backward(model, rows, step.denominator) for rows in step.rows), strict=True)
        gradients = [value.grad for value in parameters.values() if value.grad is not None]
        # in float64, because a float32 sum of millions of squares is too inexact
        norms = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients]
        norm = math.sqrt(math.fsum(part**2 for part in norms))
        # an empty batch changes neither weights nor moments nor AdamW's counter
        if step.denominator != 0:
            if section.clip_grad > 0:
                # clip_grad_norm_ would compute its own norm in float32
                torch.nn.utils.clip_grads_with_norm_(parameters.values(), section.clip_grad, torch.tensor(norm))
            for group in optimizer.param_groups:
                group["lr"] = step.lr * group["share"]
            optimizer.step()
        yield StepFound(math.fsum(sums), torch.cat(log_probs), norm)


def _groups(parameters: Mapping[str, Any], section: AdamWSection, parts: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields a group for each parameter, with its weight decay and its share of the learning rate."""
    for name, value in parameters.items():
        # transformers 5 stacks experts, so that their biases are matrices, which only the name reveals
        is_small = value.dim() < 2 or name.endswith("bias")
        decay = section.weight_decay if section.decay_norms_and_biases or not is_small else 0.0
        share = section.lr_of_parts.get(f"{parts.get(name)}_lr", section.lr) / section.lr
        yield {"params": [value], "weight_decay": decay, "share": share}


def _backward(model: Any, rows: TrainingRows, denominator: float) -> tuple[float, Tensor]:
    # [batch, seq, vocab_size]; a key/value cache would waste memory
    logits = model(rows.tokens, use_cache=False, **rows.images).logits
    # divides before backward, unlike training, so the comparison also proves that the order does not matter
    numerator, log_probs, gradient = _loss(logits.detach().flatten(0, 1), rows, denominator)
    if denominator != 0:
        logits.backward(gradient.view_as(logits))
    return numerator, log_probs


def _loss(logits: Tensor, rows: TrainingRows, denominator: float) -> tuple[float, Tensor, Tensor]:
    """Computes the weighted sum of losses, the log-probability of each label, [tokens], and the gradient [tokens,
    vocab_size] of the divided sum by the logits."""
    labels, weights = rows.labels.flatten(), rows.weights.flatten().double()
    gradient, losses, of_labels = torch.zeros_like(logits), [], []
    # a few tokens at a time, because all logits in float64 would be the largest tensors of the check
    size = max(1, _MOST_WIDE // logits.shape[1])
    for start in range(0, len(logits), size):
        chunk = slice(start, start + size)
        log_probs = logits[chunk].double().log_softmax(-1)
        likely, weight = log_probs.gather(1, labels[chunk, None]), weights[chunk, None]
        of_labels.append(likely.squeeze(1))
        # where instead of a product, because a masked token's loss may be inf
        losses.append(float(torch.where(weight > 0, -likely * weight, 0.0).sum()))
        if denominator != 0:
            change = log_probs.exp_().scatter_add_(1, labels[chunk, None], torch.full_like(likely, -1.0))
            gradient[chunk] = torch.where(weight > 0, change * (weight / denominator), 0.0).to(logits.dtype)
    return math.fsum(losses), torch.cat(of_labels), gradient
