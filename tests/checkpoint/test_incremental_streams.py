"""The order of streams on a device: an incremental checkpoint has the rows after their update, before the next one."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchrec.distributed.types import ShardedTensor

from lightning_overlap import MODES
from lightning_overlap.checkpoint import read_folder

from ..support.cases import ROWWISE_ADAGRAD, SEQUENCE, Case, Model
from ..support.pairs import in_turn
from ..support.saved import is_increment
from ..testing.test_checked_streams import train

CASES = {case.name: case for case in (ROWWISE_ADAGRAD, SEQUENCE)}


@pytest.mark.parametrize(("pipeline", "name"), in_turn(MODES, CASES))
def test_rows_of_a_device_are_those_of_the_save(tmp_path: Path, pipeline: str, name: str) -> None:
    models: list[Model] = []

    def make(case: Case) -> Model:
        models.append(Model(case))
        return models[-1]

    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    # The thread that writes is not watched: on a device it lets the host wait for the rows.
    options = {"checkpoint_format": "incremental", "async_checkpoint": True, "most_increments": 10}
    train(CASES[name], pipeline, module=make, strategy_options=options, callbacks=[saver], enable_checkpointing=True)
    newest = tmp_path / "step=7.ckpt"
    assert is_increment(newest)
    saved = read_folder(newest, weights_only=True)["state_dict"]
    for weight, value in models[-1].state_dict().items():
        whole = value.local_tensor() if isinstance(value, ShardedTensor) else value
        assert torch.equal(saved[weight], whole), weight
