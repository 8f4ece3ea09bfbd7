"""Lists a folder's contents, from headers and metadata alone."""

import math
from collections import Counter
from pathlib import Path

from rich.table import Table as Listing

from mtrain.arch import num_parameters
from mtrain.base.log import output_console
from mtrain.base.spelling import counted
from mtrain.convert.target import open_target
from mtrain.hf.io.source import open_source
from mtrain.hf.schema.files import CONFIG_NAME


def print_contents(path: Path, like: Path | None = None) -> None:
    """Prints family, size, dtypes and every tensor of a Hugging Face folder or a checkpoint; `like` describes another
    program's checkpoint."""
    if (path / CONFIG_NAME).exists():
        source = open_source(path)
        family, model = source.family, source.model
        tensors = {name: source.folder.facts(name) for name in sorted(source.folder.names())}
    else:
        target = open_target(path, like, None)
        family, model = target.family, target.model
        facts = target.tensors.tensors
        tensors = {key: (facts[key].dtype, facts[key].shape) for key in sorted(facts)}
        entries = {name: file.entries[name] for name, file in sorted(target.carried.items())}
        tensors |= {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    dtypes: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        dtypes[str(dtype).removeprefix("torch.")] += math.prod(shape)
    counts = ", ".join(f"{count:,} {dtype}" for dtype, count in dtypes.items())
    heading = f"family: {family.model_type}; {num_parameters(model):,} parameters; {counted(len(tensors), 'tensor')}"
    listing = Listing("tensor", "dtype", "shape")
    for name, (dtype, shape) in tensors.items():
        listing.add_row(name, str(dtype).removeprefix("torch."), " x ".join(map(str, shape)))
    console = output_console()
    if not console.is_terminal:  # no lines in a file or a pipe
        listing.box = None
    console.print(f"{heading}\nelements: {counts}", soft_wrap=True)
    console.print(listing)
