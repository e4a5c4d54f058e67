"""What clusters do to the scripts of `examples/cluster`, on one machine: stubs of their programs, and a fault."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from ..support.ranks import ROOT, free_port

EXAMPLES = ROOT / "examples" / "cluster"
NUM_STEPS, FAULT_AT = 16, 8
_LAUNCHERS = re.compile(r"(TORCHELASTIC|PET|SLURM|OMPI|LOCAL|GROUP|ROLE)_|(RANK|WORLD_SIZE|NODE_RANK|MASTER_ADDR)$")

# Python runs this first in every process. A signal comes to rank 1, once, while it writes the checkpoint of a step.
_FAULT = f"""
import os, sys

def is_rank_1():  # Ray's workers learn it after they have started
    return "1" in [os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")]

def watch(event, args):
    if event == "open" and "step={FAULT_AT}.ckpt" in str(args[0]) and is_rank_1():
        if not os.path.exists(os.environ["FAULT_MARK"]):
            open(os.environ["FAULT_MARK"], "w").close()
            os.kill(os.getpid(), int(os.environ["FAULT_SIGNAL"]))

sys.addaudithook(watch)
"""
# Two tasks on two hosts, both of them this one. `scontrol requeue` ends them, as Slurm does.
_SRUN = """
while [ "${1#-}" != "$1" ]; do shift; done
pids=
for task in 0 1; do SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & pids="$pids $!"; done
echo $pids > "$STUBS/tasks"
code=0; for pid in $pids; do wait $pid || code=$?; done; exit $code
"""
_SCONTROL = 'echo "$@" >> "$STUBS/scontrol.log"; kill -TERM $(cat "$STUBS/tasks")'
# Two ranks on one host. Open MPI would kill the others if one fails; here they notice it themselves.
_MPIRUN = """
echo mpirun >> "$STUBS/mpirun.log"
while [ "$1" != bash ]; do shift; done
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2
pids=
for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" & pids="$pids $!"; done
code=0; for pid in $pids; do wait $pid || code=1; done; exit $code
"""
_STUBS = {
    "python": f'exec {sys.executable} "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    **{"srun": _SRUN, "scontrol": _SCONTROL, "mpirun": _MPIRUN},
}


class Cluster:
    """A folder with the cluster's programs; its scripts, with the numbers of this machine, run beside each other."""

    def __init__(self, folder: Path, save_every: int, fault: int | None = None) -> None:
        self.folder, self.stubs = folder, folder / "stubs"
        self.stubs.mkdir()
        for name, text in _STUBS.items():
            (self.stubs / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            (self.stubs / name).chmod(0o755)
        self.arguments = _arguments(folder / "run", save_every)
        self.variables = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
        self.variables |= {"PATH": f"{self.stubs}:{os.environ['PATH']}", "STUBS": str(self.stubs)}
        self.variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if fault is not None:
            (self.stubs / "sitecustomize.py").write_text(_FAULT, encoding="utf-8")
            self.variables |= {"PYTHONPATH": f"{ROOT}:{self.stubs}", "FAULT_SIGNAL": str(int(fault))}
            self.variables["FAULT_MARK"] = str(folder / "fault")

    def script(self, name: str, replaced: Mapping[str, str]) -> str:
        """Return the path of an example's script, in which this machine's numbers stand for a cluster's."""
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        for said, done in replaced.items():
            assert said in text, said
            text = text.replace(said, done)
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        environment = self.variables | variables
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)

    def run(self, command: list[str], code: int = 0, **variables: str) -> str:
        """Run a command to its end, which has to be this exit code; return what it says."""
        return finish(self.start(command, **variables), code)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        said = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == code, said
    return said


def last_words(said: str) -> list[str]:
    """Return what rank 0 says of the last step."""
    return re.findall(rf"^step {NUM_STEPS}: loss \S+$", said, flags=re.MULTILINE)


def resumed_from(said: str) -> list[str]:
    """Return the names of the checkpoints that each start has loaded."""
    return [Path(path).name for path in re.findall(r"Restored all states from the checkpoint at (\S+)", said)]


def _arguments(folder: Path | str, save_every: int) -> tuple[str, ...]:
    return f"--folder={folder}", f"--steps={NUM_STEPS}", f"--save-every={save_every}"


def undisturbed() -> str:
    """Train on these ranks without any launcher's script, without a checkpoint."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch.object(sys, "argv", ["train.py", *_arguments(folder, NUM_STEPS + 1)]))
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    return "".join(last_words(said.getvalue()))


def pods(cluster: Cluster, path: str) -> list[subprocess.Popen[str]]:
    """Start the containers of a PyTorchJob with the variables that Kubeflow's training operator (v1) gives them."""
    job = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    variables = {
        "PYTHONUNBUFFERED": "1",
        # The operator says overlap-worker-0:23456, the name of the first pod.
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_RDZV_CONF": ",".join(f"{one['key']}={one['value']}" for one in elastic["rdzvConf"]),
        **{one["name"]: one["value"] for one in container["env"]},
    }
    command = [*container["command"], *cluster.arguments]
    return [cluster.start(command, **variables) for _ in range(worker["replicas"])]
