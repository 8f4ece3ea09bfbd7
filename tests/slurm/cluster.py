"""A real Slurm on one machine: slurmctld and one slurmd for each node, on the loopback interface, without munge,
systemd, cgroups or accounting.

Needs Debian's packages slurmctld, slurmd and slurm-client (tests/slurm/install.sh), and root, which names the nodes in
/etc/hosts for as long as the cluster is up.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
HOSTS = Path("/etc/hosts")
_MARK = "# mtrain-tests-slurm"
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def missing() -> list[str]:
    """Lists what this machine lacks for a cluster."""
    lacks = [name for name in PROGRAMS if shutil.which(name) is None]
    return lacks if os.access(HOSTS, os.W_OK) else [*lacks, f"permission to write {HOSTS}"]


class Cluster:
    """A cluster that is up inside the `with` block; every process that it started is gone afterwards."""

    def __init__(
        self,
        folder: Path,
        num_nodes: int = 2,
        cpus: int = 2,
        settings: Mapping[str, str] | None = None,
        partitions: Sequence[str] = ("debug Nodes=ALL Default=YES",),
    ) -> None:
        """
        Args:
            folder: Empty folder for configuration, state and logs.
            num_nodes: Number of nodes, called n1, n2, ...
            cpus: Number of CPUs of each node, which may exceed the machine's.
            settings: Settings of slurm.conf that extend or replace ours.
            partitions: Partitions in the form that slurm.conf has after PartitionName=.
        """
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, num_nodes + 1)]
        self._cpus, self._settings, self._partitions = cpus, dict(settings or {}), partitions
        self.conf = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**_without_slurm(os.environ), "SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Cluster:
        for name in ("state", "spool", "log", "run"):
            (self.folder / name).mkdir(parents=True)
        self._write_conf()
        _name_in_hosts(self.nodes)
        try:
            self.start_controller()
            for node in self.nodes:
                self.start_node(node)
            self.wait(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"), "all nodes idle", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "--user", "root", check=False, timeout=10)
            self.wait(lambda: not self.run("squeue", "-h", "-t", "R,CG", timeout=5).strip(), "no job", 20)
        for daemon in [*self.nodes, "slurmctld"]:
            self._stop(daemon)
        for process in self._left_behind():
            with suppress(psutil.Error):
                process.kill()
        _name_in_hosts([])

    def run(self, *command: str, check: bool = True, timeout: float = 60, cwd: Path | None = None) -> str:
        """Runs a command of Slurm and returns its standard output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path | None = None) -> str:
        """Runs sbatch with these arguments and returns the job's number."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd).strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Returns what Slurm knows of a job, by name: JobState, Restarts, ExitCode, ..."""
        text = self.run("scontrol", "show", "job", "-o", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def minutes(self, number: str) -> int:
        """Returns for how many full minutes a job has run since its latest start."""
        hours, minutes, _ = self.job(number)["RunTime"].split("-")[-1].split(":")
        return 60 * int(hours) + int(minutes)

    def nodes_of(self, number: str) -> list[str]:
        """Returns the nodes where a job runs, or has run last."""
        return self.run("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    def wait_for_job(self, number: str, states: Sequence[str], limit_s: float = 120) -> dict[str, str]:
        """Waits until a job is in one of these states; returns what Slurm knows of it."""
        self.wait(lambda: self.job(number)["JobState"] in states, f"job {number} in {states}", limit_s)
        return self.job(number)

    def wait(self, is_true: Callable[[], bool], what: str, limit_s: float) -> None:
        """Waits until the condition is true; fails with what the cluster knows after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while not is_true():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{path}\n{path.read_text()[-3000:]}" for path in (self.folder / "log").iterdir())
                queue = self.run("squeue", "-o", "%i %T %r %N", check=False)
                raise AssertionError(f"not within {limit_s} s: {what}\n{queue}\n{logs}")
            time.sleep(_POLL_S)

    def node_states(self) -> dict[str, str]:
        """Returns the state of each node, as sinfo has it, without its flags."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).split("\n")
        return {name: state.rstrip("*~#!%$@^-") for name, state in (line.split() for line in lines if line)}

    def start_controller(self) -> None:
        """Starts slurmctld, which resumes from its state on disk."""
        self._start("slurmctld", "slurmctld", "-D")

    def start_node(self, node: str) -> None:
        """Starts the slurmd of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_controller(self) -> None:
        """Kills slurmctld with SIGKILL; jobs go on running."""
        self._daemons["slurmctld"].kill()
        self._daemons.pop("slurmctld").wait()

    def kill_node(self, node: str, with_tasks: bool) -> None:
        """Kills a node's slurmd with SIGKILL: with all processes, like a power loss, or alone, like a lost network."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        pids: list[int] = []
        if with_tasks:
            pids += [
                number
                for process in self._left_behind()
                if _environ(process).get("SLURMD_NODENAME") == node
                for number in (process.pid, process.ppid())
                if number == process.pid or "slurmstepd" in _name(number)
            ]
        self._kill(pids)

    def signal_script(self, job: str, number: signal.Signals) -> None:
        """Sends the batch script of a job the signal that Slurm would send it, without a controller."""
        for process in self._left_behind():
            if _environ(process).get("SLURM_JOB_ID") == job and "slurm_script" in _name(process.pid):
                process.send_signal(number)

    def _kill(self, pids: Sequence[int]) -> None:
        for pid in dict.fromkeys(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, *command: str) -> None:
        """Starts a daemon in the foreground, as a child that ends with us: killed tests leave no cluster."""
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*command, "-f", str(self.conf)],
                env=self.environment,
                stdout=output,
                stderr=output,
                preexec_fn=partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    def _stop(self, name: str) -> None:
        if (daemon := self._daemons.pop(name, None)) is None:
            return
        daemon.terminate()
        try:
            daemon.wait(timeout=20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _left_behind(self) -> list[psutil.Process]:
        """Returns the processes of this cluster's jobs."""
        return [
            one
            for one in psutil.process_iter()
            if _environ(one).get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in _environ(one)
        ]

    def _write_conf(self) -> None:
        here, ports = socket.gethostname().split(".")[0], free_ports(len(self.nodes) + 1)
        spool, log, run = (self.folder / name for name in ("spool", "log", "run"))
        settings = {
            "ClusterName": "tests",
            "SlurmctldHost": f"{here}(127.0.0.1)",
            "SlurmctldPort": str(ports[0]),
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",  # loopback only
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "AuthInfo": "cred_expire=5",  # a requeued job starts after 6 s, not 121
            "StateSaveLocation": str(self.folder / "state"),
            "SlurmdSpoolDir": str(spool / "%n"),
            "SlurmctldPidFile": str(run / "slurmctld.pid"),
            "SlurmdPidFile": str(run / "slurmd-%n.pid"),
            "SlurmctldLogFile": str(log / "slurmctld.log"),
            "SlurmdLogFile": str(log / "slurmd-%n.log"),
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "bf_interval=1,sched_min_interval=0,batch_sched_delay=0",
            "SlurmdParameters": "config_overrides",  # nodes may have more CPUs than the machine
            "ReturnToService": "2",
            "SlurmdTimeout": "10",
            "KillWait": "20",
            "MinJobAge": "3600",
            "MessageTimeout": "10",
            **self._settings,
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={here} Port={port} CPUs={self._cpus} RealMemory=4000"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        lines += [f"PartitionName={partition} MaxTime=INFINITE State=UP" for partition in self._partitions]
        self.conf.write_text("\n".join(lines) + "\n")


def _without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _name(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _name_in_hosts(nodes: Sequence[str]) -> None:
    """Makes MASTER_ADDR, the first node's name, resolve. Edits in place, as a container cannot replace /etc/hosts."""
    kept = [line for line in HOSTS.read_text().splitlines() if not line.endswith(_MARK)]
    HOSTS.write_text("\n".join([*kept, *(f"127.0.1.{i} {node} {_MARK}" for i, node in enumerate(nodes, 1))]) + "\n")
