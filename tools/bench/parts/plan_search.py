"""Seconds of the search of `mtrain plan`: `python tools/bench/parts/plan_search.py`.

Processor time of this process alone, best of three, with the number of candidates; imports are not counted. What else
runs on the machine matters little to processor time, but a busy second thread of a core does.
"""

from __future__ import annotations

import time
from pathlib import Path
from sys import path as import_path

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.hf.configuration import load_config
from mtrain.plan.search.hardware import GPUS, Cluster
from mtrain.plan.search.search import search

ROOT = Path(__file__).parents[3]
CASES = (
    ("llama3_8b", 64, 1024),
    ("llama3_8b", 10_000, 10_000),
    ("qwen3_30b_a3b", 10_240, 10_240),
    ("deepseek_v3", 10_240, 10_240),
)
ROUNDS = 3


def main() -> None:
    """Prints a line for each case."""
    cluster = Cluster(GPUS["h100"])
    for model, gpus, batch in CASES:
        paths = [ROOT / "configs" / "model" / f"{model}.yaml", ROOT / "configs" / "run" / "pretrain.yaml"]
        config = load_config(paths, [f"train.global_batch_size={batch}"])
        seconds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            found = search(config, gpus, cluster, cluster.gpu.memory_bytes)
            seconds.append(time.process_time() - began)
        counts = found.counts
        print(
            f"{model:>14} on {gpus:>6}: {min(seconds):.2f} s, {counts.bounded:,} bounded, {counts.tried:,} tried, "
            f"{counts.measured:,} memory estimates"
        )


if __name__ == "__main__":
    main()
