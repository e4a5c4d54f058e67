"""Ray Train: its workers are killed and started again, and end with the losses of a training without a fault."""

import importlib
import json
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from .launchers import FAULT_AT, Cluster, last_words, resumed_from

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: make smoke-ray")


def test_without_ray_the_error_names_the_extra() -> None:
    with mock.patch.dict(sys.modules, {"ray": None}):
        sys.modules.pop("lightning_overlap.ray", None)
        with pytest.raises(ImportError, match=r"pip install 'lightning_overlap\[ray\]'"):
            importlib.import_module("lightning_overlap.ray")


@needs_ray
@pytest.mark.slow
def test_the_example_resumes_after_a_worker_is_killed(loss: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, save_every=FAULT_AT // 2, fault=signal.SIGKILL)
    cluster.variables["RAY_DEDUP_LOGS"] = "0"
    said = cluster.run([str(cluster.stubs / "python"), "examples/cluster/ray_train.py", *cluster.arguments])
    said = re.sub(r"\x1b\[\d+m|^.{,9}\(\w+ pid=\d+\).{,9} ", "", said, flags=re.MULTILINE)
    assert (last_words(said), set(resumed_from(said))) == ([loss], {"last.ckpt"})


@needs_ray
@pytest.mark.slow
def test_a_life_that_forgets_to_resume_is_refused_and_the_next_resumes(tmp_path: Path) -> None:
    """Ray Data, in order; the reports of RayTrainReportCallback; a life of each kind, see `ray_lives`."""
    from . import ray_lives as lives

    cluster = Cluster(tmp_path, save_every=1)
    cluster.run([str(cluster.stubs / "python"), "-m", lives.__name__, str(tmp_path)])
    for rank in range(lives.NUM_WORKERS):
        first, second, third = (
            [json.loads(line) for line in (tmp_path / f"rank{rank}.life{number}").read_text().splitlines()]
            for number in range(3)
        )
        (kind, no_environment), (_, working_folder), *first = first
        assert kind == "ValueError"
        assert "Trainer(plugins=[RayLightningEnvironment()])" in no_environment
        assert "would save its last checkpoint in " in working_folder
        (kind, by_report), (_, by_note) = second
        assert kind == "RuntimeError"
        assert "(ray.train.get_checkpoint())" in by_report
        assert f"has saved {tmp_path}/saved/step={lives.SAVE_EVERY}.ckpt, or a later one beside it" in by_note
        # The third life repeats the epoch that was cut, bit for bit; then it does so from its middle on.
        reported, saved, end = lives.STEPS_OF_EPOCH, 2 * lives.SAVE_EVERY, lives.STEPS_OF_EPOCH * lives.NUM_EPOCHS
        whole = [*first[:reported], *third[: end - reported]]
        assert [step for step, _ in whole] == [*range(1, end + 1)]
        assert first[: lives.KILLED_AT] == whole[: lives.KILLED_AT]
        assert third[end - reported :] == whole[saved:]
