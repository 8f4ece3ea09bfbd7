"""A service submitted by `mtrain launch slurm --serve` to a real Slurm, and the unmodified tinker SDK that trains with
it: two nodes with a rank each, of tensor parallelism."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from mtrain.config.load import save_config
from tests.parity.cases import case
from tests.paths import ROOT
from tests.serve.oracle import Oracle
from tests.serve.service import session
from tests.serve.test_clients import run_steps, saved
from tests.slurm.cluster import Cluster, free_ports

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

PATIENCE_S = 300.0
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", 2, 2) as cluster:
        yield cluster


def test_the_sdk_trains_with_a_service_that_outlives_its_time_limit(slurm: Cluster, tmp_path: Path) -> None:
    """What was acknowledged is there after the requeue, and goes on as the oracle does."""
    config = case(2, num_layers=1, tp=2).config(run__dir=str(tmp_path / "base"), train__device="cpu")
    folder, port = tmp_path / "base", str(free_ports(1)[0])
    save_config(config, tmp_path / "run.yaml")
    (tmp_path / "ranks.env").write_text(f"PYTHONPATH={ROOT}\nOMP_NUM_THREADS=1\n")
    (tmp_path / "ranks.env").chmod(0o600)
    given = ["--serve", f"--port={port}", "--nodes=2", "--time=60", "--max-retries=0", "--env-file=ranks.env"]
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", "launch", "slurm", "run.yaml", *given],
        cwd=tmp_path,
        env={**slurm.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"TINKER_BASE_URL=(\S+) TINKER_API_KEY=\$\(cat (\S+)\)", done.stdout)
    assert found is not None, done.stdout
    address, key = found[1], Path(found[2]).read_text().strip()
    assert address == f"http://n1:{port}"
    assert f"ssh -N -L {port}:n1:{port} " in done.stdout
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=address, api_key=key + "x").create_lora_training_client("base").result()

    with session(address, key) as service:
        client = service.create_lora_training_client("base", rank=0).result()
        oracle = Oracle(config, saved(folder, client.save_state("start").result().path, config))
        run_steps(client, oracle, LOSSES)
        path = client.save_state("last").result().path

    job = (folder / "submissions" / "0001" / "job_id").read_text().strip()
    # so near that Slurm asks for the end at once; the next start has all the time it needs
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={slurm.minutes(job) + 2}")
    slurm.wait((folder / "REQUEUE").exists, "the ranks' marker", PATIENCE_S)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", "the requeue", PATIENCE_S)
    slurm.wait(lambda: not (folder / "REQUEUE").exists(), "the second start", PATIENCE_S)
    log = folder / "logs" / f"job-{job}-1" / "rank_0.log"
    slurm.wait(lambda: log.exists() and "serving base at" in log.read_text(), "the service", PATIENCE_S)
    with session(address, key) as service:
        client = service.create_training_client_from_state_with_optimizer(path).result()
        run_steps(client, oracle, LOSSES)
    slurm.run("scancel", job)
    known = slurm.wait_for_job(job, ["CANCELLED"], PATIENCE_S)
    assert known["Restarts"] == "1"
    assert "is requeued: SIGUSR1 to a service" in (folder / "logs" / f"job-{job}.log").read_text()
