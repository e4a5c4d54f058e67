"""The scripts of `examples/cluster` train, and resume after a fault, to the loss of a training without a fault."""

import re
import signal
from pathlib import Path

import pytest

from ..support.ranks import free_port
from .launchers import FAULT_AT, Cluster, finish, last_words, pods, resumed_from

pytestmark = pytest.mark.slow


def test_torchrun_restarts_ranks_after_one_is_killed(loss: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, save_every=FAULT_AT // 2, fault=signal.SIGKILL)
    numbers = {"per-node=8": "per-node=2", ":29500": f":{free_port()}", "timeout=30": "timeout=1"}
    said = cluster.run(["bash", cluster.script("torchrun.sh", numbers), *cluster.arguments])
    assert (last_words(said), resumed_from(said)) == ([loss], ["last.ckpt"])


def test_slurm_requeues_a_job_that_is_preempted(loss: str, tmp_path: Path) -> None:
    """All ranks save after the step of the signal; the job ends by SIGTERM, and its next start resumes there."""
    cluster = Cluster(tmp_path, save_every=FAULT_AT, fault=signal.SIGUSR1)
    numbers = {"node=8": "node=1", "--folder=/shared/run1": " ".join(cluster.arguments)}
    script = cluster.script("slurm.sbatch", numbers)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", Path(script).read_text(encoding="utf-8"), re.MULTILINE))
    assert re.fullmatch(r"SIGUSR1@\d+", options["signal"])
    job = {
        **{"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": options["job-name"], "SLURM_NODELIST": "127.0.0.1"},
        **{"SLURM_NNODES": options["nodes"], "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"]},
        "SLURM_NTASKS": str(int(options["nodes"]) * int(options["ntasks-per-node"])),
    }
    said = cluster.run(["bash", script], code=128 + signal.SIGTERM, **job)
    assert (last_words(said), (cluster.stubs / "scontrol.log").read_text()) == ([], "requeue 17\n")
    said = cluster.run(["bash", script], SLURM_RESTART_COUNT="1", **job)
    assert (last_words(said), resumed_from(said)) == ([loss], ["hpc_ckpt_1.ckpt"])


def test_pods_of_a_pytorchjob_meet(loss: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, save_every=FAULT_AT)
    numbers = {"per-node=8": "per-node=1", "maxReplicas: 4": "maxReplicas: 2", "replicas: 4": "replicas: 2"}
    said = [finish(pod) for pod in pods(cluster, cluster.script("pytorchjob.yaml", numbers))]
    assert sorted(map(last_words, said)) == [[], [loss]]


def test_mpi_is_started_again_after_a_rank_is_killed(loss: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, save_every=FAULT_AT // 2, fault=signal.SIGKILL)
    script = cluster.script("mpi.sh", {"=29500": f"={free_port()}"})
    said = cluster.run(["bash", script, *cluster.arguments], HOSTS="127.0.0.1:2")
    assert (cluster.stubs / "mpirun.log").read_text() == "mpirun\n" * 2
    assert (last_words(said), resumed_from(said)) == ([loss], ["last.ckpt"])
