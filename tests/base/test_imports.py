"""The garbage collector skips modules imported at a start, and unusable packages are not found."""

import gc
import importlib
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mtrain.base import imports
from mtrain.base.certificate import Certificate, Comparison
from mtrain.base.imports import (
    faulty_gpu_packages,
    ignore_warnings_of_megatron,
    release_beyond_bounds,
    settle_gpu_packages,
    without_collections,
    without_trackers,
)
from tests.fault_table import Notice
from tests.paths import ROOT


def transformer_engine(release: str) -> dict[str, str]:
    """Returns the modules of a TransformerEngine that works."""
    return {"transformer_engine": f"__version__ = '{release}'"} | {
        f"transformer_engine.pytorch{part}": "" for part in ("", ".optimizers")
    }


def megatron(version: str) -> dict[str, str]:
    """Returns the modules of a megatron-core that says its version."""
    numbers = dict(zip(("MAJOR", "MINOR", "PATCH"), version.split(".")))
    info = "".join(f"{name} = {number}\n" for name, number in numbers.items())
    return {"megatron.core": "", "megatron.core.package_info": f"{info}PRE_RELEASE = ''"}


Install = Callable[[str, str], Path]
BROKEN = "raise OSError('libcudart.so.13: cannot open shared object file')"
FUSED_ADAM = """
class FusedAdam:
    def __init__(self, *args, **options): raise RuntimeError("a kernel of CUDA met a tensor of the CPU")
FusedSGD = multi_tensor_applier = multi_tensor_scale = multi_tensor_l2norm = FusedAdam
"""


def test_no_collection_runs_while_a_block_imports_and_the_next_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy_module.py").write_text("kept = [[] for _ in range(100_000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    frozen, collected = gc.get_freeze_count(), [each["collections"] for each in gc.get_stats()]
    try:
        with without_collections():
            import heavy_module  # type: ignore[import-not-found]

        assert [each["collections"] for each in gc.get_stats()] == collected
        assert gc.isenabled()
        assert gc.get_freeze_count() - frozen >= len(heavy_module.kept)
    finally:
        gc.unfreeze()


def test_a_failing_import_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), without_collections():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    gc.unfreeze()


def test_trackers_are_out_of_sight_of_a_block_and_found_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ImportError), without_trackers():
        import wandb
    import wandb

    with without_trackers():  # a tracker that is loaded stays
        assert sys.modules["wandb"] is wandb


def test_users_do_not_read_what_python_says_of_megatrons_source() -> None:
    """Python 3.12 and later warn of `\\-` in a text, wherever a module has not been compiled before."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        ignore_warnings_of_megatron()
        for folder in ("/opt/site-packages/megatron/core/inference", "/home/user/own"):
            warnings.warn_explicit("invalid escape sequence '\\-'", SyntaxWarning, f"{folder}/allocator.py", 426)
    assert [each.filename for each in seen] == ["/home/user/own/allocator.py"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a module on the path; no package for GPUs has been looked for yet, and changes by such a search are
    undone."""
    families = ("transformer_engine", "apex", "amp_C", "wandb", "megatron")
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] in families:
            del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_faults", None)
    monkeypatch.setattr(imports, "_beyond", None)

    def written(name: str, text: str) -> Path:
        path = tmp_path.joinpath(*name.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield written
    for name in [name for name in sys.modules if name.partition(".")[0] in families]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in families})


def test_packages_for_gpus_are_found_where_there_is_one(install: Install) -> None:
    for name, text in (transformer_engine("2.11.0") | megatron("0.16.1")).items():
        install(name, text)
    settle_gpu_packages(has_gpu=True)
    assert faulty_gpu_packages() == {}
    assert "transformer_engine.pytorch.optimizers" in sys.modules
    settle_gpu_packages(has_gpu=False)  # has been decided before
    assert importlib.import_module("transformer_engine").__version__ == "2.11.0"


@pytest.mark.fault(
    "input",
    "TransformerEngine or apex that cannot be imported, or of a release that megatron-core does not take",
    happens="torch's layers and optimizer are used, and the run notes why; model.backend=te is refused",
    exit_code=None,
)
@pytest.mark.parametrize(
    ("package", "texts", "reason"),
    [
        ("transformer_engine", {"transformer_engine": BROKEN}, "OSError: libcudart.so.13: cannot open"),
        *(
            (
                "transformer_engine",
                transformer_engine(release) | megatron(core),
                f"version {release} needs a certificate of `mtrain verify backend`, since megatron-core {core} "
                f"supports >={oldest},<{too_new}",
            )
            for core, oldest, too_new in (("0.16.1", "2.9", "2.13"), ("0.19.2", "2.14", "2.21"))
            for release in ("2.8.0", "2.13.0", "2.21.0")
        ),
        (
            "transformer_engine",
            {
                "transformer_engine": "",
                "transformer_engine.pytorch": "",
                "transformer_engine.pytorch.optimizers": BROKEN,
            },
            "OSError: libcudart.so.13",
        ),
        ("apex", {"apex": "", "apex.optimizers": ""}, "ModuleNotFoundError: No module named 'amp_C'"),
    ],
)
def test_a_package_that_cannot_be_used_is_not_found_and_the_reason_is_known(
    install: Install, notice: Notice, package: str, texts: dict[str, str], reason: str
) -> None:
    for name, text in texts.items():
        install(name, text)
    with notice:
        settle_gpu_packages(has_gpu=True)
    assert faulty_gpu_packages().keys() == {package}
    assert faulty_gpu_packages()[package].startswith(reason)
    assert find_spec(package) is None
    for name in [
        name for name in texts if name.startswith(package)
    ]:  # includes packages that were imported before the fault
        with pytest.raises(ImportError):
            importlib.import_module(name)


@pytest.mark.parametrize(("core", "release"), [("0.16.1", "2.9.0"), ("0.16.1", "2.12.1"), ("0.19.2", "2.14.0+cu132")])
def test_a_release_that_the_megatron_which_is_there_takes_is_used(install: Install, core: str, release: str) -> None:
    for name, text in (transformer_engine(release) | megatron(core)).items():
        install(name, text)
    settle_gpu_packages(has_gpu=True)
    assert faulty_gpu_packages() == {}


@pytest.mark.parametrize("passed", [True, False])
def test_a_certified_release_beyond_the_bounds_brings_its_layers_alone(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path / "certificates"))
    monkeypatch.setattr("mtrain.base.imports.program_versions", lambda: {"transformer-engine": "2.30.0"})
    found = Comparison(passed, 1.0, 2.0)
    Certificate("now", {"transformer-engine": "2.30.0"}, {}, {"te": found}).save(tmp_path / "certificates")
    for name, text in (transformer_engine("2.30.0") | megatron("0.19.2")).items():
        install(name, text)
    settle_gpu_packages(has_gpu=True)
    assert (faulty_gpu_packages() == {}) == passed
    assert (release_beyond_bounds() is not None) == passed
    with pytest.raises(ImportError):  # megatron-core then takes torch's AdamW
        importlib.import_module("transformer_engine.pytorch.optimizers")
    if passed:
        importlib.import_module("transformer_engine.pytorch")


def test_a_release_that_is_to_be_certified_is_found(install: Install) -> None:
    for name, text in (transformer_engine("2.30.0") | megatron("0.19.2")).items():
        install(name, text)
    settle_gpu_packages(has_gpu=True, takes_any_version=True)
    assert faulty_gpu_packages() == {}
    assert "version 2.30.0" in str(release_beyond_bounds())


def test_nothing_is_said_of_packages_that_are_not_there(install: Install) -> None:
    settle_gpu_packages(has_gpu=True)
    assert faulty_gpu_packages() == {}


def test_a_run_without_a_gpu_meets_no_packages_for_gpus_and_none_of_trackers_it_does_not_use(install: Install) -> None:
    """TransformerEngine works and apex does not: both would have ended the run, and so would a wandb that cannot be
    imported, which matters only to a tracker of this package."""
    folder = install("transformer_engine", "__version__ = '2.11.0'")
    install("transformer_engine.pytorch", "")
    install("transformer_engine.pytorch.optimizers", FUSED_ADAM)
    install("apex", BROKEN)
    install("wandb", BROKEN)
    sizes = ["model.num_layers=1", "train.num_steps=1", "train.global_batch_size=1", "data.seq_length=16"]
    run = [f"run.dir={folder / 'run'}", "data.kind=mock", "optimizer.lr=1e-3", "checkpoint.at_end=false"]
    command = [sys.executable, "-m", "mtrain", "train", "configs/model/tiny.yaml", *run, *sizes]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout


@pytest.mark.parametrize("is_there", [True, False])
def test_objects_of_triton_are_released_at_the_end(is_there: bool) -> None:
    """Objects that stay exempt would be listed as leaks by its bindings; without it the end is faster."""
    program = f"""
import sys, types
from mtrain.base.imports import without_collections
if {is_there}:
    sys.modules["triton"] = types.ModuleType("triton")
class Bound:
    def __del__(self): print("released")
with without_collections():
    bound = Bound()
    bound.me = bound
del bound
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "released\n" * is_there


def test_logged_messages_of_others_are_left_out_by_their_beginning(caplog: pytest.LogCaptureFixture) -> None:
    importlib.import_module("mtrain.core.ranks")
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.warning("No CUDA runtime is found, using CUDA_HOME='/usr/local'")
    logger.warning("anything else")
    assert caplog.messages == ["anything else"]
