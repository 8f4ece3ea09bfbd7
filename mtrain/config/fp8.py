"""Rules of `train.fp8`: TransformerEngine's products in 8 bits need sizes that their kernels accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import Fp8Recipe


def broken_rules(config: Sections) -> Iterator[str]:
    """Yields a message for every broken rule; none where `train.fp8` is off."""
    train, model = config.train, config.model
    if train.fp8 is None:
        if train.fp8_recipe is not None:
            yield (
                f"train.fp8_recipe={train.fp8_recipe} scales products in fp8, but train.fp8 is not set; set it to "
                "hybrid or e4m3"
            )
        return
    key = f"train.fp8={train.fp8}"
    if train.fp8_recipe == "delayed":
        yield (
            "train.fp8_recipe=delayed scales by the largest elements of earlier steps, which checkpoints do not hold, "
            "so a run that goes on would be another one; set it to tensorwise, blockwise or mxfp8"
        )
    if train.device == "cpu":
        yield f"{key} needs a GPU, but train.device=cpu; set train.device=cuda, or remove train.fp8"
    if model.backend == "torch":
        yield f"{key} needs TransformerEngine's layers, but model.backend=torch; set it to auto, or remove train.fp8"
    if train.precision != "bf16":
        yield f"{key} keeps everything but products in bf16, but train.precision={train.precision}; set it to bf16"
    if train.compile != "none":
        yield (
            f"{key} needs TransformerEngine's layers, which train.compile={train.compile} leaves out; remove one of "
            "the two"
        )
    if train.offload_layers is not None:
        yield (
            f"{key} needs TransformerEngine's layers, which train.offload_layers={train.offload_layers} leaves out; "
            "remove one of the two"
        )
    yield from _unaligned(config, key)


def _unaligned(config: Sections, key: str) -> Iterator[str]:
    """Yields a message for each size on a rank that a product in 8 bits cannot have."""
    model, layout, train = config.model, config.layout, config.train
    columns, rows = _multiples(train.fp8_recipe or "tensorwise")
    heads = (model.num_attention_heads + 2 * model.query_groups) * model.head_size
    sizes = {
        "model.hidden_size": model.hidden_size,
        "columns of queries, keys and values / layout.tp": heads // layout.tp,
        "model.num_attention_heads x head size / layout.tp": model.num_attention_heads * model.head_size // layout.tp,
        "model.ffn_hidden_size / layout.tp": model.ffn_hidden_size // layout.tp,
    }
    for name, size in sizes.items():
        if size % columns:
            yield (
                f"{key} needs {name}={size} to be a multiple of {columns}, as its kernels require; change it, "
                "or remove train.fp8"
            )
    tokens = train.micro_batch_size * config.row_width // layout.cp
    if tokens % rows:
        yield (
            f"{key} needs a multiple of {rows} tokens in a rank's microbatch, but train.micro_batch_size x row width / "
            f"layout.cp={tokens}; change one of them, or remove train.fp8"
        )


def _multiples(recipe: Fp8Recipe) -> tuple[int, int]:
    """Returns the numbers that columns and tokens have to be multiples of.

    Source: TransformerEngine 2.9, assert_dim_for_fp8_exec and the blocks of its recipes.
    """
    match recipe:
        case "delayed" | "tensorwise":
            return 16, 8
        case "mxfp8":
            return 32, 32
        case "blockwise":
            return 128, 128
        case _:
            assert_never(recipe)
