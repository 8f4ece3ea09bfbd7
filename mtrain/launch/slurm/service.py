"""A service that runs as a Slurm job: waits until it listens, and says how to reach it."""

import shlex
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from mtrain.base.errors import MachineError
from mtrain.base.plain_files import parsed_json, read_plain_file
from mtrain.launch.slurm.submit import ask_slurm, fields_of, reason_to_wait

_POLL_S = 1.0
_POLLS_PER_QUESTION = 10
"""Looks into the run folder per query to Slurm's controller, which many users share."""
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
)
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class ServiceOptions:
    """How to reach a job's service."""

    port: int
    token_file: Path
    host: ClassVar[str] = "0.0.0.0"
    """Clients come from other machines."""

    @property
    def verb(self) -> list[str]:
        return ["serve", "--host", self.host, "--port", str(self.port), "--token-file", str(self.token_file.absolute())]


def wait_for_service(run_dir: Path, job: str, tell: Callable[[str], None]) -> str:
    """Waits until a queued job's service listens, and returns its address; tells, once each, why it may never start."""
    reported = None
    while True:
        for _ in range(_POLLS_PER_QUESTION):
            if (address := _address(run_dir, job)) is not None:
                return address
            time.sleep(_POLL_S)
        known: dict[str, str] = {}
        with suppress(MachineError):  # Slurm may be too busy to answer
            shown = ask_slurm("scontrol", "show", "job", "-o", job)
            known = fields_of(shown.stdout) if shown.returncode == 0 else {}
        if (warning := reason_to_wait(job, known)) is not None and warning != reported:
            tell(warning)
            reported = warning
        if (state := known.get("JobState")) in _ENDED:
            log = run_dir / "logs" / f"job-{job}.log"
            raise MachineError(f"job {job} has ended ({state}) before its service listened{_reason(log)}; read {log}")


def ways_there(address: str, token_file: Path) -> str:
    there = urlsplit(address)
    here = f"http://127.0.0.1:{there.port}"
    key = f"TINKER_API_KEY=$(cat {shlex.quote(str(token_file))})"
    return (
        f"  from this cluster: export TINKER_BASE_URL={address} {key}\n"
        f"  from elsewhere:    ssh -N -L {there.port}:{there.hostname}:{there.port} {socket.gethostname()}, then "
        f"TINKER_BASE_URL={here}"
    )


def _address(run_dir: Path, job: str) -> str | None:
    """Reads the address of the job's service; None without a file, or if an earlier job wrote it."""
    with suppress(OSError, ValueError):
        service = parsed_json(read_plain_file(run_dir / "service.json", _MOST_BYTES))
        if service.get("slurm_job") == job:
            return str(service["address"])
    return None


def _reason(log: Path) -> str:
    """Returns a colon and the first error in a job's log, or an empty string."""
    with suppress(OSError, UnicodeDecodeError):
        lines = read_plain_file(log, _MOST_BYTES).decode().splitlines()
        return next((f": {line.removeprefix('error: ')}" for line in lines if line.startswith("error: ")), "")
    return ""
