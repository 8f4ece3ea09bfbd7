"""Read the weights of a checkpoint into numpy: `python examples/read_checkpoint.py runs/first`.

This needs no ranks, GPU or configuration, whichever layout saved the checkpoint. Checksums of all bytes are verified
first.
"""

import sys

import numpy as np

from mtrain import read_weights


def main(path: str) -> None:
    """Prints the shape and the size of each weight, and the tokens nearest to token 0."""
    weights = read_weights(path)  # a run folder (its newest checkpoint) or one checkpoint
    for name, values in weights.items():  # each is read on access
        rms = float(np.sqrt(np.mean(values**2)))
        print(f"{name:60} {'x'.join(map(str, values.shape)):>16}  rms {rms:.4f}")

    embeddings = weights["embedding.word_embeddings.weight"]  # [vocab_size, hidden]
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    nearest = np.argsort(unit @ unit[0])[::-1]
    print(f"nearest to token 0: {nearest[1:4].tolist()}")


if __name__ == "__main__":
    main(sys.argv[1])
