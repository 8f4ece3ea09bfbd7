"""Rules of `layout.shard=weights`: unsupported features, each refused by name."""

from collections.abc import Iterator

from mtrain.config.schema.sections import Sections

_FUSED = "gradient_accumulation_fusion"


def broken_rules(config: Sections) -> Iterator[str]:
    """Yields a message for every key that `layout.shard=weights` cannot be combined with."""
    if config.layout.shard == "optimizer":
        return
    for key, remedy in _refused(config):
        yield f"{key} cannot be combined with layout.shard=weights; {remedy}, or set layout.shard=optimizer"


def _refused(config: Sections) -> Iterator[tuple[str, str]]:
    """Yields each key with its value, and what to do about it."""
    model, layout, train = config.model, config.layout, config.train
    if layout.etp > 1:
        yield f"layout.etp={layout.etp}", "set layout.etp=1"
    if train.fp8 is not None:
        yield f"train.fp8={train.fp8}", "remove it"
    if train.compile == "layers":
        yield "train.compile=layers", "use regions"
    if train.offload_layers is not None:
        yield f"train.offload_layers={train.offload_layers}", "use train.recompute=full"
    if train.offload_optimizer:
        yield "train.offload_optimizer=true", "remove it"
    if not train.distributed_optimizer:
        yield "train.distributed_optimizer=false", "remove it"
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(train, name):
            yield f"train.{name}=true", "remove it, as layers are always gathered and reduced while others compute"
    if model.backend == "te":
        yield "model.backend=te", "set model.backend=torch"
    if model.megatron.get(_FUSED):
        yield f"model.megatron.{_FUSED}", "remove it"
