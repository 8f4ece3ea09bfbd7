"""Differences between the supported versions of megatron-core."""

import functools
from typing import Any

from torch import Tensor


def gradients_of_norm(part: Any) -> list[Tensor]:
    """Returns the gradients that one of megatron-core's optimizers includes in its norm."""
    of_norm = getattr(part, "get_grads_for_grad_norm", None)  # from 0.19 on
    return list(part.get_main_grads_for_grad_norm() if of_norm is None else of_norm())


def feed_forward_spec(submodules: Any) -> Any:
    """Builds the layer spec of megatron-core's MLP from its MLPSubmodules."""
    # imported here, since replacements of triton and CUDA must be installed before megatron-core
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.mlp import MLP

    build = getattr(MLP, "as_mlp_submodule", None)  # exists in 0.19, not in 0.16
    return ModuleSpec(module=MLP, submodules=submodules) if build is None else functools.partial(build, submodules)
