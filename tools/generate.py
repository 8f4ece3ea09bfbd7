"""`mtrain generate` by its name of 0.1.0: python tools/generate.py runs/a --prompt "def f(x)" """

import typer

from mtrain.cli.ranks import generate

if __name__ == "__main__":
    typer.run(generate)
