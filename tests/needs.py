"""Requirements of some tests on the machine: without them the tests do not run, and the suite names them at its end.

With MTRAIN_REQUIRE_ALL_TESTS=1, as CI sets it, they run all the same and fail, so that none is lost unnoticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.slurm.cluster import missing
from tests.tools.wheels import (
    FLASH_LINEAR_ATTENTION,
    OTHER_MEGATRON,
    TRANSFORMER_ENGINE,
    TRANSFORMERS_4,
    other_python,
    transformers_4,
    unpacked,
)

REQUIRE_ALL = "MTRAIN_REQUIRE_ALL_TESTS"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Need:
    """Requirement that not every machine meets."""

    fixture: str
    """Fixture whose users have the need."""
    what: str
    is_met: Callable[[], bool]


def browser_program() -> str | None:
    """Returns the browser: $MTRAIN_BROWSER, else the first of BROWSERS on PATH; None where there is none."""
    return os.environ.get("MTRAIN_BROWSER") or next((path for name in BROWSERS if (path := shutil.which(name))), None)


def may_mount() -> bool:
    """Says whether this user may mount a disk that only its own processes see."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        own = [unshare, "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"]
        mount = [*own, "mount", "-t", "tmpfs", "tmpfs", folder]
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def can_simulate_a_gpu() -> bool:
    """Says whether tests/simulated_gpu can take CUDA's places in torch, which a build for CUDA has filled itself."""
    import torch  # not before: the process that hands tests to workers runs none

    return shutil.which("c++") is not None and not torch.backends.cuda.is_built()


NEEDS = (
    Need(
        "chromium", "a chromium on PATH or in MTRAIN_BROWSER (launch/browser.sh)", lambda: browser_program() is not None
    ),
    Need(
        "slurm",
        "Debian's slurmctld, slurmd and slurm-client, and the right to write /etc/hosts (tests/slurm/install.sh)",
        lambda: not missing(),
    ),
    Need("flaky_disk", "a C compiler (cc)", lambda: shutil.which("cc") is not None),
    Need("simulated_gpu", "a C++ compiler (c++), or a build of torch without CUDA", can_simulate_a_gpu),
    Need(
        "transformer_engine_wheel",
        f"the wheel of {TRANSFORMER_ENGINE}, which pip could not bring",
        lambda: unpacked(TRANSFORMER_ENGINE) is not None,
    ),
    Need(
        "flash_linear_attention_wheel",
        f"the wheel of {FLASH_LINEAR_ATTENTION}, which pip could not bring",
        lambda: unpacked(FLASH_LINEAR_ATTENTION) is not None,
    ),
    Need(
        "other_python",
        f"the wheel of {OTHER_MEGATRON}, which pip could not bring",
        lambda: other_python() is not None,
    ),
    Need(
        "transformers_4",
        f"the wheels of {', '.join(TRANSFORMERS_4)}, which pip could not bring",
        lambda: transformers_4() is not None,
    ),
    Need("on_a_small_disk", "the right to mount in a namespace of one's own (unshare --map-root-user)", may_mount),
)

NOT_RUN = pytest.StashKey[dict[str, list[str]]]()
"""Need -> tests that this machine cannot run."""


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the tests whose need is not met, and notes them."""
    not_run = config.stash.setdefault(NOT_RUN, {})
    if os.environ.get(REQUIRE_ALL) == "1":
        return
    for need in NEEDS:
        concerned = [item for item in items if need.fixture in getattr(item, "fixturenames", ())]
        if concerned and not need.is_met():
            not_run[need.what] = [item.nodeid for item in concerned]
            config.hook.pytest_deselected(items=concerned)
            items[:] = [item for item in items if item not in concerned]


def report_not_run(reporter: pytest.TerminalReporter, not_run: dict[str, list[str]]) -> None:
    """Reports the tests that were not run, as the last text of the suite."""
    for what, tests in not_run.items():
        reporter.section(f"not run: {len(tests)}", red=True, bold=True)
        reporter.line(f"This machine lacks {what}. With {REQUIRE_ALL}=1 these tests fail instead:")
        for test in tests:
            reporter.line(f"  {test}")
