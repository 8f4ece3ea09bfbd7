"""`mtrain stdlib-corpus` by its name of 0.1.0: python tools/stdlib_corpus.py --output corpus"""

import typer

from mtrain.cli.text import stdlib_corpus

if __name__ == "__main__":
    typer.run(stdlib_corpus)
