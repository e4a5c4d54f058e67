"""Fits, evaluations and `check_module` in the cells of a Jupyter kernel."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

ROOT = Path(__file__).resolve().parents[2]
SET_UP = """
import warnings; warnings.simplefilter("ignore")
import logging; logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_overlap import OverlapEmbeddingStrategy
from tests.support.cases import TABLE_WISE, Batches, Model
from tests.support.fits import QUIET
QUIET = {**QUIET, "accelerator": "cpu", "max_epochs": 1}

def fit(devices, strategy):
    model = Model(TABLE_WISE)
    trainer = Trainer(devices=devices, strategy=strategy, **QUIET)
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 4))
    return model
"""


@pytest.fixture(scope="module")
def cell() -> Iterator[Callable[[str], str]]:
    """Runs a cell in a kernel, and returns what it prints, or its error."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3", env=env, cwd=str(ROOT))

    def run(code: str) -> str:
        said = []

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
            elif message["msg_type"] == "execute_result":
                said.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                said.append(f"{content['ename']}: {content['evalue']}")

        client.execute_interactive(code, timeout=120, output_hook=note)
        return "".join(said).strip()

    try:
        run(SET_UP)
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_cells(cell: Callable[[str], str]) -> None:
    """In the order of a notebook: the message, two devices by fork, one device, and the check."""
    refused = cell("fit(2, OverlapEmbeddingStrategy())")
    assert refused.startswith("ValueError: ")
    assert "strategy='overlap_embedding_notebook'" in refused

    learned = cell(
        "before = Model(TABLE_WISE).state_dict()\nmodel = fit(2, 'overlap_embedding_notebook')\n"
        "print([name for name, value in model.state_dict().items() if torch.equal(value, before[name])])"
    )
    assert learned == "[]"

    assert cell("print(len(fit(1, OverlapEmbeddingStrategy('semi_sync')).losses))") == "4"

    refused = cell("fit(2, 'overlap_embedding_notebook')")
    assert "this process has a process group" in refused
    assert cell("torch.distributed.destroy_process_group()") == ""

    report = cell(
        "from lightning_overlap.testing import check_module\n"
        "print(check_module(lambda: Model(TABLE_WISE), Batches(TABLE_WISE, 8), 'fused_sparse_dist').holds)"
    )
    assert report == "True"
