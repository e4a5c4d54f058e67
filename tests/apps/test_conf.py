"""Every config file composes and names what exists, and what a config may not say is answered before a rank starts."""

import gzip
import inspect
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import get_object
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_overlap import MODES, STREAMS, Mode, OverlapEmbeddingStrategy
from lightning_overlap.apps import build, config_checks
from lightning_overlap.apps.hydra_command import add_or_override
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM
from lightning_overlap.tables import check_fused_optimizer

CONF = Path(str(files("lightning_overlap"))) / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__")


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(*overrides: str, command: str = "config") -> dict[str, Any]:
    """The config that the command line `overrides` gives, as `overlap-train` (or "bench") sees it."""
    with initialize_config_module("lightning_overlap.conf", version_base="1.3"):
        config = compose(command, [add_or_override(override) for override in overrides])
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def check(*overrides: str) -> None:
    config = composed(*overrides)
    config_checks.check(config)
    build.check(config)


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in names(group)])
def test_each_file_composes_and_its_options_exist(choice: str) -> None:
    config = composed(choice, command="bench" if choice.startswith("bench=") else "config")
    nodes = [config["model"], config["data"], *config["logger"].values(), *config["callbacks"].values()]
    for node in nodes:
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        assert node.keys() - {"_target_"} <= parameters.keys()


def test_each_mode_and_stream_policy_has_a_file_and_a_line_of_help() -> None:
    assert names("pipeline") == sorted([*MODES, "auto"])
    assert names("stream") == sorted(STREAMS)
    words = (CONF / "config.yaml").read_text(encoding="utf-8").split("template:")[1].split()
    assert {*MODES, *STREAMS} <= set(words)


def test_auto_with_an_option_that_is_off_and_a_schedule_of_ones_own() -> None:
    [mode] = config_checks.modes(composed("pipeline=auto", "pipeline.defer_update=false"))  # as in a sweep
    assert mode.schedule.name == "auto"
    text = "mine: copy_batch_to_device+1/memcpy dense_forward+0/compute backward+0/compute optimizer_step+0/compute"
    config = composed(f"pipeline.schedule='{text}'", "compare=[base,semi_sync]")
    assert [mode.schedule.name for mode in config_checks.modes(config)] == ["base", "semi_sync", "mine"]
    assert str(config_checks.modes(config)[-1].schedule) == text


def test_names_that_tables_print_are_modes_to_compare_and_arms() -> None:
    printed = ["async_lookup_3", "async_lookup_5_deferred"]
    compared = config_checks.modes(composed(f"compare=[{','.join(printed)}]"))
    assert [mode.schedule for mode in compared[:-1]] == [Mode(name).schedule for name in printed]
    with pytest.raises(
        ValueError, match=r"mode of compare 'async_lokup_3'. Did you mean Mode\('async_lookup', staleness=3"
    ):
        check("compare=[async_lokup_3]")
    bench = composed("arms=[async_lookup_3,async_lookup_5/dedicated+fp16]", command="bench")
    assert {"async_lookup_3", "async_lookup_5/dedicated+fp16"} <= set(config_checks.arms(bench))
    assert config_checks.our_arms(bench)["async_lookup_3"][0] == Mode("async_lookup_3").schedule


@pytest.mark.parametrize(
    ("override", "group"),
    [
        ("strategy.quantized_comms=fp16", "comms"),
        ("strategy.stream=dedicated", "stream"),
        ("strategy.pipeline=base", "pipeline"),
        ("strategy.sharding=table_wise", "sharding"),
        ("trainer.logger=false", "logger"),
        ("trainer.callbacks=[]", "callbacks"),
    ],
)
def test_an_argument_that_a_group_sets(override: str, group: str) -> None:
    key = re.escape(override.partition("=")[0])
    with pytest.raises(ValueError, match=rf"{key}: the group {group} sets it\. Write {group}=\.\.\., or"):
        check(f"++{override}")


def test_the_trainers_strategy_is_made_by_the_command() -> None:
    with pytest.raises(
        ValueError, match=r"trainer\.strategy: the group strategy sets it\. Write strategy\.OPTION=\.\.\.$"
    ):
        check("++trainer.strategy=ddp")


def strategy_of(*overrides: str) -> OverlapEmbeddingStrategy:
    config = composed("data.num_tables=2", *overrides)
    return build.build_strategy(config, Mode("base"), build.build_model(config, build.build_data(config)))


def test_sharding_and_a_fused_optimizer_reach_the_strategy() -> None:
    for override, sharding in (
        ("sharding=planner", None),
        ("sharding=column_wise", "column_wise"),
        ("sharding.tables.cat_1=data_parallel", {"cat_0": "table_wise", "cat_1": "data_parallel"}),
    ):
        assert strategy_of(override).sharding == sharding
    made = strategy_of("strategy.fused_optimizer=[torch.optim.SGD,{lr: 0.25}]")
    assert check_fused_optimizer(made.fused_optimizer) == (torch.optim.SGD, {"lr": 0.25})


@pytest.mark.parametrize("name", names("comms"))
def test_comms_reach_the_strategy(name: str) -> None:
    comms = strategy_of(f"comms={name}").quantized_comms
    sent = ["none"] if comms is None else [str(comms.forward_precision), str(comms.backward_precision)]
    assert "_".join(dict.fromkeys(sent)) == name


def test_balance_reaches_the_strategy() -> None:
    assert strategy_of("balance=none").balance is None
    balance = strategy_of("balance=ids", "strategy.balance.evaluation=true").balance
    assert balance is not None
    assert balance.evaluation
    batch = next(iter(SyntheticDataModule(num_tables=3, batch_size=7).train_dataloader()))
    assert balance.cost(batch).shape == (7,)
    assert balance.cost(batch).sum() == batch.sparse.lengths().sum()


def test_a_loss_scale_is_an_option_of_comms() -> None:
    comms = strategy_of("comms=fp16", "comms.backward_loss_scale=1024").quantized_comms
    assert comms is not None
    assert (comms.forward_loss_scale, comms.backward_loss_scale) == (None, 1024)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.name=semi_sink"], "unknown pipeline 'semi_sink'. Did you mean 'semi_sync'"),
        (["stream.name=dedicatd"], "unknown stream 'dedicatd'. Did you mean 'dedicated'"),
        (["compare=[bas]"], "unknown mode of compare 'bas'. Did you mean 'base'"),
        (["pipeline.schedule='mine: copy_batch_to_device+0/compute'"], "'mine': dense_forward is missing"),
        (["pipeline=auto", "pipeline.staleness=3"], "pipeline=auto takes no options of modes, got pipeline.staleness"),
        (["pipeline.stalness=2"], "unknown option of pipeline 'stalness'. Did you mean 'staleness'"),
        (["trainer.precision=16-mixed"], "Use trainer.precision=bf16-mixed"),
        (["trainer.max_stepz=3"], "unknown option of trainer 'max_stepz'. Did you mean 'max_steps'"),
        (["trainer.devices=none"], "-1 for all), got 'none'"),
        (["task=tset"], "unknown task 'tset'. Did you mean 'test'"),
        (["task=test"], "task=test needs a checkpoint: ckpt_path="),
        (["compare=base"], "compare must be a list of modes, got 'base'"),
        (["metric=auc"], "begins with val or test, got 'auc'. Did you mean 'test_auc'"),
        (["data.batchsize=3"], "unknown option of data 'batchsize'. Did you mean 'batch_size'"),
        (["data.batch_size=0"], "batch_size"),
        (["data.batch_size=1.5"], "data.batch_size must be an integer, got 1.5"),
        (["trainer.max_epochs=many"], "trainer.max_epochs must be an integer or null, got 'many'"),
        (["comms.forward=fp61"], "quantized_comms: unknown precision 'fp61'. Did you mean 'fp16'"),
        (["comms=fp16", "comms.forwards=fp16"], "unknown option of comms 'forwards'. Did you mean 'forward'"),
        (["comms=bf16"], "quantized_comms: bf16 (forward) cannot be sent by a CPU"),
        (["seed=abc"], "seed must be an integer >= 0, got 'abc'"),
        (["callbacks=deltas"], "callbacks=deltas needs a destination: deltas.path=..."),
        (["comms=fp16", "comms.backward_loss_scale=abc"], "backward_loss_scale must be a positive number, got 'abc'"),
        (["comms=int8", "comms.backward_loss_scale=2"], "backward_loss_scale=2 does nothing"),
        (["sharding.tables.cat_9=table_wise"], "sharding: unknown table 'cat_9'"),
        (["sharding.type=grid_shard"], "sharding of table 'cat_0': 'grid_shard' is not possible on cpu"),
    ],
)
def test_bad_words_are_answered_before_a_rank_starts(overrides: list[str], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        check(*overrides)


@pytest.mark.parametrize("group", ["data", "model"])
def test_a_class_that_python_does_not_find_or_that_no_config_names(group: str) -> None:
    message = (
        f"{group}._target_ is 'shop_of_mine.Things', and Python does not find 'shop_of_mine'. Install your package"
    )
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        check(f"{group}._target_=shop_of_mine.Things")
    with pytest.raises(ImportError, match="Nowhere"):
        check(f"{group}._target_={__name__}.Nowhere")
    with pytest.raises(ValueError, match=f"{group} has no _target_"):
        check(f"~{group}._target_")


class DealsOutNothing(LightningDataModule):
    pass


def test_lightning_deals_out_the_rows_of_a_data_module_that_does_not() -> None:
    given = [
        build.complete(composed(*overrides, command=command))["trainer"].get("use_distributed_sampler")
        for command, *overrides in (
            ("config", f"data._target_={__name__}.DealsOutNothing"),
            ("config",),
            ("config", "trainer.use_distributed_sampler=true"),
            ("bench", f"data._target_={__name__}.DealsOutNothing"),  # trains each rank's batches as they are
        )
    ]
    assert given == [None, False, True, False]


class WithoutFusedOptimizer(LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t0", feature_names=["t0"], num_embeddings=1000, embedding_dim=16)
        self.ebc = EmbeddingBagCollection(tables=[config])


class OwnsEverything(DLRM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_a_table_that_nothing_or_two_optimizers_would_train_is_answered_before_a_rank_starts() -> None:
    untrained, twice = (
        f"model._target_={__name__}.{kind.__name__}" for kind in (WithoutFusedOptimizer, OwnsEverything)
    )
    for sharding in ("sharding=planner", "sharding=table_wise"):
        with pytest.raises(ValueError, match=r"for ebc\.t0: set 'strategy\.fused_optimizer=\[torch\.optim\.SGD"):
            check(untrained, sharding)
    check(untrained, "strategy.fused_optimizer=[torch.optim.SGD,{lr: 0.1}]")
    with pytest.raises(ValueError, match=r"dense optimizer the weights of fused tables: ebc\.cat_0"):
        check(twice)
    for own in (untrained, twice):
        check(own, "sharding=data_parallel")


def test_a_checkpoint_or_a_loggers_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"ckpt_path: 'nowhere\.ckpt' does not exist"):
        check("ckpt_path=nowhere.ckpt")
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    for logger in ("tensorboard", "wandb"):
        with pytest.raises(ModuleNotFoundError, match=f"logger={logger} needs {logger}: pip install it"):
            check(f"logger={logger}")


def test_bad_data_files_are_answered_before_a_rank_starts(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        check("data=adult", f"data.path={tmp_path / 'nowhere.gz'}")
    with gzip.open(tmp_path / "rows.gz", "wt") as file:
        file.write("1\t2\t3\n")
    for data in ("adult", "criteo"):
        with pytest.raises(ValueError, match=r"rows\.gz:1: expected \d+ "):
            check(f"data={data}", f"data.path={tmp_path / 'rows.gz'}")
