"""Processes started by `spawn` and `fork` give whole tables back, and trainers can be copied and pickled."""

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.plugin.processes import own_memory

from ..support import reference
from ..support.cases import COLUMN_WISE, MIXED, TABLE_WISE, Batches, Case, Model, make_plan
from ..support.fits import QUIET, make_strategy, make_trainer
from ..support.ranks import Ranks
from ..support.reference import Result, collect
from ..tables.supported_modules import KindModel
from .strategies import Dense
from .test_evaluation import NUM_STEPS, Evaluated, WithEvaluation
from .test_trainer_features import Configured

ROOT = Path(__file__).resolve().parents[2]
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda trainer: pickle.loads(pickle.dumps(trainer)),
    "cloudpickle": lambda trainer: pickle.loads(cloudpickle.dumps(trainer)),
}


class Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("a fault of rank 1")
        return super().training_step(batch, batch_idx)


def start(strategy: Any, **kwargs: Any) -> Trainer:
    own = LightningEnvironment()  # though these tests' ranks are in an environment of torchrun's
    kwargs = {**QUIET, "max_epochs": 1, **kwargs}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[own], **kwargs)


def state_of(model: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def fit_and_more(folder: Path, method: str, case: Case) -> dict[str, Any]:
    """Fit, evaluate, evaluate the best checkpoint, and fit again with another trainer."""
    model, data, saver = Evaluated(case), WithEvaluation(case), ModelCheckpoint(folder / method)
    options = {"start_method": method, "sharding": make_plan(case, model, 2)}
    trainer = start(OverlapEmbeddingStrategy(**options), callbacks=[saver], enable_checkpointing=True)
    trainer.fit(model, datamodule=data)
    found: dict[str, Any] = {"weights": state_of(model), "metrics": dict(trainer.callback_metrics)}
    if method == "spawn":
        return found
    found["unsharded"] = trainer.lightning_module is model and not dist.is_initialized()
    found["best"] = Path(saver.best_model_path).name
    found["own_optimizers"] = [
        copies(trainer).lightning_module.ebc.embedding_bags["t0"].weight._optimizer_classes
        for copies in COPIES.values()
    ]
    found["validate"] = trainer.validate(model, datamodule=data, verbose=False)
    found["test"] = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
    found["refused"] = refusal(trainer, model, data)
    model.bottom[0].weight.data.add_(1.0)  # of this process alone
    found["before_second"] = state_of(model)
    start(OverlapEmbeddingStrategy(**options)).fit(model, datamodule=data)
    found["second"] = state_of(model)
    return found


def refusal(trainer: Trainer, model: Any, datamodule: Any = None, fn: str = "fit", **kwargs: Any) -> str:
    try:
        getattr(trainer, fn)(model, datamodule=datamodule, **kwargs)
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return "nothing was refused"


def refuse_after_a_fit() -> tuple[str, str]:
    """Fit here, then let processes be started: with the same module, and with a new one."""
    model = Model(TABLE_WISE)
    make_trainer(OverlapEmbeddingStrategy()).fit(model, datamodule=Batches(TABLE_WISE, 2))
    with mock.patch.dict(os.environ):  # Lightning's environment takes what torchrun set out of it
        trainers = [start(OverlapEmbeddingStrategy(start_method="fork")) for _ in range(2)]
        return refusal(trainers[0], model), refusal(trainers[1], Model(TABLE_WISE))


def fit_from(case: Case, state: dict[str, Tensor]) -> Result:
    model = Model(case)
    model.load_state_dict(state)
    trainer = make_trainer(make_strategy(model))
    trainer.fit(model, datamodule=Batches(case, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses)


def copies_train_alike(how: str, tables: bool, pipeline: Any) -> list[tuple[bool, bool, bool]]:
    """Copy a trainer before, between and after fits; train with each, and with the original.

    Return of each copy whether it said so, whether it has something of the run, and whether it trains alike.
    """
    found = []
    trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding="table_wise"))
    for num_epochs in (1, 2, 3):
        with warnings.catch_warnings(record=True, action="always") as caught:
            copied = COPIES[how](trainer)
        said, strategy = any("copy" in str(warning.message) for warning in caught), copied.strategy
        of_a_run = bool(strategy.streams or strategy.checkpoint_group or strategy.num_in_flight)
        losses = []
        for which in (copied, trainer):
            model: Any = Model(TABLE_WISE) if tables else Dense()
            which.fit_loop.max_epochs = num_epochs
            which.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS) if tables else None)
            losses.append(torch.stack(model.losses))
        found.append((said, of_a_run, torch.equal(*losses)))
    return found


def copied_module() -> str:
    model = Model(TABLE_WISE)
    make_trainer(OverlapEmbeddingStrategy()).fit(model, datamodule=Batches(TABLE_WISE, 2))
    copied = copy.deepcopy(model)
    assert torch.equal(copied.bottom[0].weight, model.bottom[0].weight)
    with pytest.raises(RuntimeError) as caught:
        copied.ebc(None)
    for name in ("embedding_bags", "embeddings", "weight", "embedding_bag_configs"):
        assert not hasattr(copied.ebc, name)
        with pytest.raises(AttributeError, match=f"{name}: this module is a copy, and its ShardedEmbeddingBag"):
            getattr(copied.ebc, name)
    return str(caught.value)


def missing_checkpoint(fn: str, path: str) -> list[str]:
    """Return what is said of it under DDPStrategy, and by ours of a module with tables."""
    pairs = ((DDPStrategy(), False), (OverlapEmbeddingStrategy(), True))
    models = [(strategy, Evaluated(TABLE_WISE, fused_optimizer=fused)) for strategy, fused in pairs]
    return [refusal(make_trainer(one), model, WithEvaluation(TABLE_WISE), fn, ckpt_path=path) for one, model in models]


def fit_by_processes(path: str) -> None:
    """Fit by `fork` and `spawn`; what this process then has goes to a file of that folder."""
    warnings.simplefilter("ignore")
    folder = Path(path)
    torch.set_num_threads(2)
    torch.randn(500, 500).exp().sum()  # by two threads, which a forked process does not have
    found: dict[str, Any] = {"fork": fit_and_more(folder, "fork", MIXED)}
    found["spawn"] = fit_and_more(folder, "spawn", COLUMN_WISE)
    for model in (Fails(TABLE_WISE), Configured(TABLE_WISE, "cpu")):
        trainer = start(OverlapEmbeddingStrategy(start_method="fork"))
        found[type(model).__name__] = refusal(trainer, model, Batches(TABLE_WISE, 2))
    torch.save(found, folder / "found.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds that lets the strategy start its processes."""
    folder = tmp_path_factory.mktemp("started")
    log = folder / "log"
    command = [sys.executable, "-c", f"from {__name__} import fit_by_processes; fit_by_processes({str(folder)!r})"]
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "start_new_session": True}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    try:
        code = process.wait(300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
    assert code == 0, log.read_text(encoding="utf-8", errors="replace")
    return torch.load(folder / "found.pt", weights_only=False)  # type: ignore[no-any-return]


def differing(whole: dict[str, Tensor], results: list[Result]) -> list[str]:
    """Name the parts of ranks that are not those of whole weights, and the weights that no rank has."""
    others, seen = [], set()
    for result in results:
        for key, value in {**result.tables, **result.dense}.items():
            table, _, offsets = key.partition(" ")
            [name] = [name for name in whole if name == key or name.split(".")[-2] == table]
            first = [int(offset) for offset in offsets.strip("[]").split(",")] if offsets else [0] * value.dim()
            window = tuple(slice(start, start + size) for start, size in zip(first, value.shape, strict=True))
            seen.add(name)
            if not torch.equal(whole[name][window], value):
                others.append(key)
    return others + sorted(whole.keys() - seen)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "case"), [("fork", MIXED), ("spawn", COLUMN_WISE)])
def test_the_parent_gets_the_weights_of_the_plain_loop(
    two_ranks: Ranks, found: dict[str, Any], method: str, case: Case
) -> None:
    results = two_ranks.run(reference.train, case, num_steps=NUM_STEPS)
    assert differing(found[method]["weights"], results) == []
    assert found[method]["metrics"].keys() == {"loss"}


@pytest.mark.slow
def test_the_parent_goes_on(two_ranks: Ranks, found: dict[str, Any]) -> None:
    """Evaluation answers from what was given back, a checkpoint from what was saved; another fit begins with it."""
    fork = found["fork"]
    assert fork["unsharded"]
    assert fork["best"].endswith(f"step={NUM_STEPS}.ckpt")
    [validated], [tested] = fork["validate"], fork["test"]
    assert validated["loss"] == tested["loss"] == fork["metrics"]["loss"].item()
    assert "NotImplementedError: Calling `trainer.fit()` twice" in fork["refused"]  # by Lightning, as ever
    assert differing(fork["second"], two_ranks.run(fit_from, MIXED, fork["before_second"])) == []
    assert fork["own_optimizers"] == [[torch.optim.SGD]] * len(COPIES)  # of a copied module's tables


@pytest.mark.slow
def test_a_fault_on_one_rank_ends_the_fit(found: dict[str, Any]) -> None:
    """And this process goes on, with the fit that comes after it in the script."""
    assert found["Fails"].startswith("ProcessRaisedException:")
    assert "ValueError: a fault of rank 1" in found["Fails"]


@pytest.mark.slow
def test_tables_that_the_parent_has_not_are_refused(found: dict[str, Any]) -> None:
    assert "ebc.embedding_bags.t0.weight, " in found["Configured"]
    assert "Make all tables in the module's __init__" in found["Configured"]


@pytest.mark.parametrize(
    ("make", "num_nodes", "text"),
    [
        (lambda: Model(TABLE_WISE, device="meta"), 1, "ebc.t0, ebc.t1, ebc.t2 are on the meta device"),
        (lambda: KindModel("managed_bags"), 1, "managed collision modules cannot be given back"),
        (lambda: Model(TABLE_WISE), 2, "tables are given back on the first of several nodes only"),
    ],
    ids=["on_meta", "managed_collision", "several_nodes"],
)
def test_refused_before_processes_are_started(make: Callable[[], Any], num_nodes: int, text: str) -> None:
    message = refusal(start(OverlapEmbeddingStrategy(start_method="fork"), num_nodes=num_nodes), make())
    assert message.startswith(f"ValueError: start_method='fork': {text}")
    assert message.endswith("per rank: run the script itself (start_method='popen', the default), or torchrun.")


def test_refused_after_a_fit_in_this_process(get_ranks: Callable[..., Ranks]) -> None:
    [(sharded, fresh)] = get_ranks(1).run(refuse_after_a_fit)
    assert sharded.startswith("ValueError: start_method='fork': the module was sharded in this process")
    assert fresh.startswith("RuntimeError: start_method='fork': this process has a process group")


@pytest.mark.parametrize(
    ("name", "start_method"),
    [("overlap_embedding_spawn", "spawn"), ("overlap_embedding_fork", "fork"), ("overlap_embedding_notebook", "fork")],
)
def test_names_of_start_methods(name: str, start_method: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
    assert isinstance(strategy, OverlapEmbeddingStrategy)
    # What Lightning asks in a notebook.
    assert strategy.launcher is not None
    assert strategy.launcher.is_interactive_compatible == (start_method == "fork")


def test_memory_that_ranks_share_becomes_their_own() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).share_memory()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    own_memory(module)
    assert not any(tensor.is_shared() for tensor in (*module.parameters(), *module.buffers()))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("how", "tables", "pipeline"),
    [*((how, True, "semi_sync") for how in COPIES), ("deepcopy", False, "semi_sync"), ("pickle", True, "auto")],
)
def test_a_copied_trainer_trains_as_the_original(two_ranks: Ranks, how: str, tables: bool, pipeline: Any) -> None:
    for found in two_ranks.run(copies_train_alike, how, tables, pipeline):
        assert found == [(False, False, True), *[(tables, False, True)] * 2]


def test_a_copied_module_says_that_its_shards_are_elsewhere(get_ranks: Callable[..., Ranks]) -> None:
    [message] = get_ranks(1).run(copied_module)
    assert "its ShardedEmbeddingBagCollection has no shards: shards stay with their process" in message


@pytest.mark.parametrize(
    ("fn", "name"),
    [("fit", "nothing.ckpt"), ("fit", "folder/nothing"), ("validate", "folder"), ("test", "a"), ("predict", "a.ckpt")],
)
def test_a_missing_checkpoint_is_told_in_lightnings_words(ranks: Ranks, tmp_path: Any, fn: str, name: str) -> None:
    path = str(tmp_path / name)
    for said in ranks.run(missing_checkpoint, fn, path):
        assert said == [f"FileNotFoundError: Checkpoint file not found: {path}"] * 2


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE")

SCRIPT = """
import sys
from lightning.pytorch import Trainer, callbacks
from lightning_overlap import OverlapEmbeddingStrategy
from tests.support.cases import TABLE_WISE, Batches, Model
from tests.support.fits import QUIET

def fail_at(index, where):
    if sys.argv[1] == where and index == 5:
        raise OSError("the disk of a rank " + "is gone")

class FailingData(Batches):
    def train_dataloader(self):
        for index, batch in enumerate(super().train_dataloader()):
            fail_at(index, f"data of rank {self.trainer.global_rank}")
            yield batch

class Failing(Model):
    def training_step(self, batch, batch_idx):
        fail_at(batch_idx, f"step of rank {self.global_rank}")
        return super().training_step(batch, batch_idx)

averages = [callbacks.StochasticWeightAveraging(0.1)] if sys.argv[1] == "all ranks" else []
strategy = OverlapEmbeddingStrategy(sharding="table_wise")
trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, callbacks=averages, **QUIET)
trainer.fit(Failing(TABLE_WISE), FailingData(TABLE_WISE, 20))
"""
COMMAND = ("-m", "lightning_overlap.train", "experiment=smoke", "trainer.precision=16-true", "callbacks=none")
GONE = "OSError: the disk of a rank is gone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("script.py", "step of rank 0"), GONE),  # rank 0 keeps the store by which ranks tell each other
        (("script.py", "data of rank 1"), GONE),
        (("script.py", "all ranks"), "ValueError: StochasticWeightAveraging cannot be used with sharded tables"),
        ((*TORCHRUN, "script.py", "data of rank 1"), GONE),
        ((*TORCHRUN, *COMMAND, "logger=none"), "ValueError: precision='16-true' converts the module's weights"),
    ],
    ids=["step", "data", "all_ranks", "torchrun", "command"],
)
def test_the_cause_comes_once_and_last(tmp_path: Path, arguments: tuple[str, ...], cause: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stdout.count(cause) == 1
    assert cause in [line for line in done.stdout.splitlines() if "Error: " in line][-1]
    assert "closed by peer" not in done.stdout
    assert "meta tensor" not in done.stdout
