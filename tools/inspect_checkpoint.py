"""`mtrain inspect` by its name of 0.1.0: python tools/inspect_checkpoint.py PATH"""

from mtrain.cli.inspect import inspect_app

if __name__ == "__main__":
    inspect_app(prog_name="inspect_checkpoint.py")
