"""`mtrain convert`: converts between Hugging Face's model folders and checkpoints, and proves the result.

Needs no GPU, no model object and no process group, and reads one tensor at a time. After an interruption, the same call
continues where it stopped.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.ground import require_ground
from mtrain.base.spelling import counted
from mtrain.cli.arguments import Verbs, folder_of
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    import torch

    from mtrain.convert.proof import Proof

convert_app = typer.Typer(
    cls=Verbs,
    help="Converts between Hugging Face's model folders and checkpoints, with a proof at the end.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Form = StrEnum("Form", {"mtrain": "mtrain", "megatron_lm": "megatron-lm"})
"""Program that reads the written checkpoint."""
Dtype = StrEnum("Dtype", ["keep", "float32", "float16", "bfloat16"])
"""Dtype to cast tensors to."""
ExportDtype = StrEnum("ExportDtype", ["keep", "float32", "float16", "bfloat16", "mxfp4"])
"""Dtype or format of the tensors in an export."""
HfOption = Annotated[
    Path, typer.Option(help="Folder with config.json and *.safetensors.", show_default=False, callback=folder_of)
]
OutArgument = Annotated[Path | None, typer.Argument(metavar="OUT", help="The same as --out.", show_default=False)]
OutOption = Annotated[Path | None, typer.Option(help="Folder to create; must not exist.", show_default=False)]
CheckpointOption = Annotated[Path, typer.Option(help="A checkpoint, or a run folder.", show_default=False)]
SourceOption = Annotated[Path | None, typer.Option(help="A checkpoint, or a run folder.", show_default=False)]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of the written tensors.")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Number of files to work on at once.")]
LogitsOption = Annotated[
    bool, typer.Option("--check-logits", help="Run both models on random tokens and compare; needs transformers.")
]
ThresholdOption = Annotated[float, typer.Option(help="Largest relative difference of logits.")]


@convert_app.command("import")
def import_(
    folder: Annotated[Path | None, typer.Argument(metavar="HF", help="The same as --hf.", show_default=False)] = None,
    target: OutArgument = None,
    hf: Annotated[
        Path | None, typer.Option(help="Folder with config.json and *.safetensors.", show_default=False)
    ] = None,
    out: OutOption = None,
    to: Annotated[
        Form, typer.Option(help="Program that reads it; megatron-lm: weights only, in torch_dist.")
    ] = Form.mtrain,
    dtype: DtypeOption = Dtype.keep,
    mtp_depths: Annotated[
        int,
        typer.Option(
            min=0,
            help="MTP depths to train; with 0, exports of Qwen3-Next and Qwen3.5 contain the original ones.",
        ),
    ] = 0,
    vision: Annotated[
        bool,
        typer.Option(
            "--vision",
            help="Import the vision tower as part of the model; by default, exports contain the original one.",
        ),
    ] = False,
    workers: WorkersOption = 1,
    check_logits: LogitsOption = False,
    threshold: ThresholdOption = 1e-4,
) -> None:
    """Hugging Face -> a checkpoint for `checkpoint.initialize_from`, or one for Megatron-LM."""
    hf, out = _named("import HF OUT", "HF", "--hf", folder, hf), _named("import HF OUT", "OUT", "--out", target, out)
    hf = folder_of(hf) or hf
    with one_message():
        require_ground()
        from mtrain.checkpoint.store.imported import MODEL_NAME
        from mtrain.convert.importing import import_for_megatron, import_hf  # loads torch
        from mtrain.convert.target import DTYPE_NAMES
        from mtrain.hf.hub import cached
        from mtrain.hf.schema.description import notes_on_folder

        hf = Path(cached(str(hf)))
        if to is Form.megatron_lm:
            _refuse_for_megatron(check_logits, mtp_depths, vision)
            _print_imported(import_for_megatron(hf, out, DTYPE_NAMES.get(dtype), workers))
            print(
                f"{out} is complete, without optimizer and random states; start Megatron-LM with: --load {out} "
                "--finetune --no-load-optim --no-load-rng --dist-ckpt-strictness log_all"
            )
            return
        proof = import_hf(hf, out, DTYPE_NAMES.get(dtype), workers, mtp_depths, vision)
        for note in notes_on_folder(str(hf)):
            print(f"note: {note}")
        _print_imported(proof)
        if check_logits:
            _check_logits(out, hf, threshold)
        print(f"{out} is complete; train it with: mtrain train configs/run/finetune.yaml {out / MODEL_NAME}")


def _refuse_for_megatron(check_logits: bool, mtp_depths: int, vision: bool) -> None:
    """Raises ConfigError for options that a checkpoint for Megatron-LM cannot have."""
    if check_logits:
        raise ConfigError("--check-logits loads checkpoints of mtrain; remove it, or remove --to")
    if mtp_depths:
        raise ConfigError("--mtp-depths is for checkpoints of mtrain; remove it, or remove --to")
    if vision:
        raise ConfigError("--vision is only for checkpoints of mtrain; remove --vision or --to")


def _print_imported(proof: "Proof") -> None:
    print(f"proven: {counted(proof.num_tensors, 'tensor')} convert back to the same {proof.size_bytes} bytes")


@convert_app.command("export")
def export(
    source: Annotated[
        Path | None, typer.Argument(metavar="CHECKPOINT", help="The same as --checkpoint.", show_default=False)
    ] = None,
    target: OutArgument = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint, or a run folder.", show_default=False)] = None,
    out: OutOption = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose config.json and tokenizer are used; default: the origin's.", callback=folder_of
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="File that describes the model of a Megatron-LM or Megatron-Bridge checkpoint; default: --like's.",
            callback=folder_of,
        ),
    ] = None,
    dtype: Annotated[
        ExportDtype,
        typer.Option(help="Dtype of the written tensors; mxfp4 applies to those published in it, others keep theirs."),
    ] = ExportDtype.keep,
    workers: WorkersOption = 1,
    check_logits: LogitsOption = False,
    threshold: ThresholdOption = 1e-4,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="Export only the adapter, as a PEFT folder, instead of merging it into its model."
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload the export to the Hugging Face Hub once it is proven."),
    ] = None,
) -> None:
    """A checkpoint -> Hugging Face, with adapters merged; also reads Megatron-LM and Megatron-Bridge (torch_dist).
    --dtype float32 exports the main weights of a run."""
    checkpoint = _named("export CHECKPOINT OUT", "CHECKPOINT", "--checkpoint", source, checkpoint)
    out = _named("export CHECKPOINT OUT", "OUT", "--out", target, out)
    with one_message():
        require_ground()
        from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
        from mtrain.convert.exporting import export_hf
        from mtrain.convert.target import DTYPE_NAMES

        if like is not None and model is not None:
            raise ConfigError(f"--like {like} and --model {model} both describe the model; remove one of them")
        if check_logits and megatron_folder(checkpoint) is not None:
            raise ConfigError(
                f"--check-logits loads checkpoints of mtrain, but {checkpoint} is another program's; export without "
                "it, then import the folder with --check-logits"
            )
        upload = _uploader(push)  # before the work of an export
        if adapter:
            _export_adapter(checkpoint, out, dtype)
            upload(out)
            return
        form: torch.dtype | Literal["mxfp4"] | None = "mxfp4" if dtype is ExportDtype.mxfp4 else DTYPE_NAMES.get(dtype)
        proof = export_hf(checkpoint, out, like or model, form, workers)
        _print_exported(proof)
        if check_logits:
            _check_logits(checkpoint, out, threshold)
        print(f"{out} is complete")
        upload(out)


def _print_exported(proof: "Proof") -> None:
    exact = proof.num_tensors - len(proof.rounding)
    print(f"proven: {counted(exact, 'tensor')} are the checkpoint's, {proof.size_bytes} bytes")
    if proof.num_in_mxfp4:
        worst = max(proof.rounding.values(), default=0.0)
        print(
            f"mxfp4: {len(proof.rounding)} of {counted(proof.num_in_mxfp4, 'tensor')} "
            f"{'was' if len(proof.rounding) == 1 else 'were'} rounded, by at most {worst:.2g} of the largest number in "
            "a block"
        )


def _export_adapter(checkpoint: Path, out: Path, dtype: ExportDtype) -> None:
    from mtrain.convert.adapters import export_adapter
    from mtrain.convert.target import DTYPE_NAMES

    if dtype is ExportDtype.mxfp4:
        raise ConfigError("--dtype mxfp4 writes whole models, but --adapter an adapter; remove one of them")
    proof = export_adapter(checkpoint, out, DTYPE_NAMES.get(dtype))
    print(f"proven: {counted(proof.num_tensors, 'tensor')} are the checkpoint's, {proof.size_bytes} bytes")
    print(f"{out} is complete; load it on top of the frozen model with peft.PeftModel.from_pretrained")


@convert_app.command()
def verify(
    checkpoint: CheckpointOption,
    hf: HfOption,
    workers: WorkersOption = 1,
    check_logits: LogitsOption = False,
    threshold: ThresholdOption = 1e-4,
) -> None:
    """Compares a checkpoint with a folder, tensor by tensor."""
    with one_message():
        require_ground()
        from mtrain.convert.verifying import verify_hf

        proof = verify_hf(checkpoint, hf, workers)
        print(f"proven: {counted(proof.num_tensors, 'tensor')} are the same, {proof.size_bytes} bytes")
        if check_logits:
            _check_logits(checkpoint, hf, threshold)


@convert_app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A checkpoint, or a Hugging Face folder.", show_default=False, callback=folder_of
        ),
    ],
    like: Annotated[
        Path | None,
        typer.Option(
            help="Folder that describes the model of a Megatron-LM or Megatron-Bridge checkpoint.", callback=folder_of
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="File that describes the model, instead of --like.", callback=folder_of)
    ] = None,
) -> None:
    """Describes a folder or a checkpoint, from its headers."""
    with one_message():
        from mtrain.convert.inspecting import print_contents

        print_contents(path, like or model)


def _uploader(name: str | None) -> Callable[[Path], None]:
    """Returns the function that uploads a folder; raises ConfigError if the upload would fail. No name: no upload."""
    if name is None:
        return lambda folder: None
    from mtrain.convert.pushing import logged_in, push

    api = logged_in(name)
    return lambda folder: print(f"{folder} is uploaded: {push(folder, name, api)}")


def _named(usage: str, name: str, option: str, positional: Path | None, named: Path | None) -> Path:
    """Returns a folder that the user gave as an argument or as an option; `usage` is the verb with its arguments."""
    if positional is None and named is None:
        raise typer.BadParameter(f"is missing; write mtrain convert {usage}", param_hint=f"{name} or {option}")
    if positional is not None and named is not None:
        raise typer.BadParameter(f"{named} and {positional} are both given; remove one of them", param_hint=option)
    return positional if positional is not None else named or Path()


def _check_logits(checkpoint: Path, hf: Path, threshold: float) -> None:
    from mtrain.convert.verifying import compare_logits

    difference = compare_logits(checkpoint, hf)
    print(f"logits: largest difference {difference:.2e} of the largest logit, threshold {threshold:.0e}")
    if not difference <= threshold:
        raise DataError(f"the logits of {checkpoint} and {hf} differ by {difference:.2e}, above {threshold:.0e}")
