"""Results of transformers for folders, in a chosen version: a program, since one process holds one version."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.warm import program_environment

TOKENS = torch.arange(24)[None] * 7 % 57


def environment_of_4(folders: list[Path]) -> dict[str, str]:
    """Returns the environment of a process that imports transformers 4."""
    return program_environment() | {
        "PYTHONPATH": ":".join([*map(str, folders), program_environment()["PYTHONPATH"]]),
        "TRANSFORMERS_VERBOSITY": "critical",
        "HF_HUB_OFFLINE": "1",
    }


def answer(folder: str) -> torch.Tensor | None:
    """Computes logits [1, 24, vocab_size] in float32; None where transformers refuses the folder or fills tensors at
    random."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        is_text = not hasattr(config, "vision_config")
        auto = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        model, found = auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
        if found["missing_keys"] or found["mismatched_keys"]:
            return None
        with torch.no_grad():
            # experts of a quantised model stay in bfloat16 whatever dtype says
            logits: torch.Tensor = model.float().eval()(TOKENS).logits
            return logits
    except Exception:  # a type, a shape, a missing package: such a folder computes nothing here
        return None


def main(out: str, *folders: str) -> None:
    """Saves the version and the answer for each folder."""
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers: dict[str, Any] = {folder: answer(folder) for folder in folders}
    torch.save({"version": transformers.__version__, "answers": answers}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
