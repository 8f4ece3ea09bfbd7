"""A checkpoint that megatron-core 0.19.2 wrote by itself, `megatron_0_19.tar.xz`, and the program that made it.

pip download --no-deps --only-binary :all: --python-version 3.12 megatron-core==0.19.2    # unpack the wheel
PYTHONPATH=WHEEL:. python -m tests.core.state.megatron_0_19 FOLDER                       # torch 2.15 with triton
tar -cJf tests/core/state/megatron_0_19.tar.xz -C FOLDER .
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ARCHIVE = Path(__file__).with_name("megatron_0_19.tar.xz")
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 1,
}
"""Sizes whose names Megatron and we share."""
VOCABULARY = 32


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the weight of a name, exact in bf16, without its leading axis of layers.

    Args:
        name: Name of the parameter, layers with their number.
        shape: Shape of the whole parameter.
    """
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(-128, 128, shape, generator=generator) / 256


def main(folder: Path) -> None:
    """Writes iter_0000100 below the folder, by Megatron's own model and writer on a CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    from megatron.core import dist_checkpointing, package_info, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    assert package_info.__version__.startswith("0.19.2"), package_info.__version__
    target = folder / "iter_0000100"
    target.mkdir(parents=True)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = GPTModel(
        config=TransformerConfig(
            **MODEL,
            use_cpu_initialization=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
        ),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(name, tuple(parameter.shape)))
    state = {
        "args": argparse.Namespace(num_layers=MODEL["num_layers"]),
        "iteration": 100,
        "model": model.bfloat16().sharded_state_dict(metadata={"non_homogeneous_layers": False}),
        "rng_state": ShardedObject("rng_state", [{"random_rng_state": 1}], (1, 1), (0, 0), replica_id=0),
        "rerun_state_machine": {"sharded": ShardedObject("rerun_state_machine_state", {"state": None}, (1,), (0,))},
    }
    dist_checkpointing.save(state, str(target), content_metadata={"made": True}, verify_integrity=True)
    dist.destroy_process_group()
    (folder / "store").unlink(missing_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


if __name__ == "__main__":  # its writer starts a process, which imports this module
    os.environ["NO_VCS_VERSION"] = "1"
    main(Path(sys.argv[1]))
