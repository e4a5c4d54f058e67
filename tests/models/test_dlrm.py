"""DLRM as a TorchRec user's module: its forward, who owns which parameter, and its metrics against plain references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from lightning_overlap.data import RecBatch, SyntheticDataModule
from lightning_overlap.models import DLRM
from lightning_overlap.models.dlrm import BinnedAUC, NormalizedEntropy

TABLES = {"a": 30, "b": 20, "c": 10}


def batch_of(seed: int = 0, num_tables: int = 3) -> RecBatch:
    data = SyntheticDataModule(num_tables, list(TABLES.values()), num_dense=5, batch_size=16, num_batches=1, seed=seed)
    (batch,) = data.train_dataloader()
    return batch


def model_of(**kwargs) -> DLRM:
    torch.manual_seed(0)
    tables = {f"cat_{place}": num_rows for place, num_rows in enumerate(TABLES.values())}
    return DLRM(tables, num_dense=5, **{"embedding_dim": 4, "table_device": "cpu"} | kwargs)


class Reordered(torch.nn.Module):
    """Answers with the keys in another order, as a sharded collection may."""

    def __init__(self, ebc: torch.nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, kjt) -> KeyedTensor:
        pooled = self.ebc(kjt).to_dict()
        keys = list(pooled)[::-1]
        return KeyedTensor(keys, [pooled[key].shape[1] for key in keys], torch.cat([pooled[key] for key in keys], 1))


def test_the_forward_is_bottom_mlp_pooled_rows_pairwise_dots_top_mlp():
    model, batch = model_of(), batch_of()
    dense = model.bottom(batch.dense)
    vectors = [dense]
    for name in model.features:
        weight = model.ebc.embedding_bags[name].weight
        vectors.append(torch.stack([weight[bag].sum(0) for bag in batch.sparse[name].to_dense()]))
    dots = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(4) for j in range(i)]
    expected = model.top(torch.cat([dense, *dots], dim=1)).squeeze(1)
    assert torch.allclose(model(batch), expected, atol=1e-6)
    assert model(batch).shape == (16,)


def test_the_order_in_which_tables_answer_changes_nothing():
    model, batch = model_of(), batch_of()
    expected = model(batch)
    model.ebc = Reordered(model.ebc)
    assert torch.equal(model(batch), expected)


def test_the_lookup_is_issued_before_the_bottom_mlp_and_read_after_it():
    model, events = model_of(), []

    class Lazy:
        def __init__(self, pooled: KeyedTensor) -> None:
            self.pooled = pooled

        def to_dict(self) -> dict[str, Tensor]:
            events.append("read")
            return self.pooled.to_dict()

    class LazyCollection(torch.nn.Module):
        def forward(self, kjt) -> Lazy:
            events.append("issued")
            return Lazy(ebc(kjt))

    ebc, model.ebc = model.ebc, LazyCollection()
    model.bottom.register_forward_hook(lambda *_: events.append("bottom"))
    model(batch_of())
    assert events == ["issued", "bottom", "read"]


def test_a_layer_to_the_embedding_dim_is_added_only_where_it_is_missing():
    assert [m.out_features for m in model_of(bottom_layers=(8, 4)).bottom if hasattr(m, "out_features")] == [8, 4]
    assert [m.out_features for m in model_of(bottom_layers=(8,)).bottom if hasattr(m, "out_features")] == [8, 4]
    assert model_of(bottom_layers=(), top_layers=())(batch_of()).shape == (16,)


def test_tables_are_on_meta_by_default_and_the_dense_layers_are_not():
    on_meta = [name for name, parameter in DLRM({"a": 10**9}, num_dense=2).named_parameters() if parameter.is_meta]
    assert on_meta == ["ebc.embedding_bags.a.weight"]


def test_the_initial_scale_is_the_whole_tables_also_for_a_shard_of_it():
    (config,) = DLRM({"a": 10_000}, num_dense=2).ebc.embedding_bag_configs()
    shard = config.init_fn(torch.empty(100, 16))
    assert shard.abs().max().item() == pytest.approx(0.01, rel=0.01)
    assert shard.abs().max() <= 0.01


def owned(model: DLRM) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)] for group in model.configure_optimizers().param_groups for p in group["params"]}


@pytest.mark.parametrize("rate", [0.1, None])
def test_the_dense_optimizer_takes_tables_that_nothing_else_updates(rate):
    model = model_of(table_learning_rate=rate)
    assert owned(model) == {name for name, _ in model.named_parameters() if not (rate and name.startswith("ebc"))}


@pytest.mark.parametrize(
    ("name", "kind"), [("rowwise_adagrad", "RowWiseAdagrad"), ("adagrad", "Adagrad"), ("sgd", "SGD")]
)
def test_the_fused_optimizer_updates_the_rows_looked_up_inside_backward(name, kind):
    model, batch = model_of(fused_optimizer=name, table_learning_rate=0.1), batch_of()
    assert {type(weight._in_backward_optimizers[0]).__name__ for weight in model.ebc.parameters()} == {kind}
    before = {key: value.clone() for key, value in model.ebc.state_dict().items()}
    model.log = lambda *args, **kwargs: None  # no trainer here
    model.training_step(batch, 0).backward()
    for feature in model.features:
        key = f"embedding_bags.{feature}.weight"
        changed = (model.ebc.state_dict()[key] != before[key]).any(1).nonzero().flatten().tolist()
        assert changed == sorted(set(batch.sparse[feature].values().tolist()))


def pairwise_auc(scores: list[float], labels: list[int]) -> float:
    clicks = [s for s, y in zip(scores, labels, strict=True) if y]
    others = [s for s, y in zip(scores, labels, strict=True) if not y]
    pairs = [1.0 if c > o else 0.5 if c == o else 0.0 for c in clicks for o in others]
    return sum(pairs) / len(pairs) if pairs else 0.5


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(-15, 15), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 5))
def test_the_binned_auc_is_the_share_of_pairs_in_order(samples, batch_size):
    """Integer logits fall into bins of their own, so that the histogram is exact."""
    metric = BinnedAUC()
    for first in range(0, len(samples), batch_size):
        chunk = torch.tensor(samples[first : first + batch_size], dtype=torch.float32)
        metric.update(chunk[:, 0], chunk[:, 1])
    expected = pairwise_auc([s for s, _ in samples], [y for _, y in samples])
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


def test_the_binned_auc_resolves_rare_clicks():
    torch.manual_seed(0)
    logits = torch.randn(5000) - 6  # probabilities around 0.002
    labels = (torch.rand(5000) < torch.sigmoid(logits + 3)).float()
    metric = BinnedAUC()
    metric.update(logits, labels)
    assert metric.compute().item() == pytest.approx(pairwise_auc(logits.tolist(), labels.int().tolist()), abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 1)), min_size=2, max_size=30))
def test_normalized_entropy_is_log_loss_over_entropy_over_any_batches(samples):
    scores, labels = (torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True))
    metric = NormalizedEntropy()
    metric.update(scores[:1], labels[:1])
    metric.update(scores[1:], labels[1:])
    rate = labels.mean().item()
    if rate in (0.0, 1.0):
        assert metric.compute().isinf()
        return
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels).item()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metric.compute().item() == pytest.approx(loss / entropy, rel=1e-4, abs=1e-6)


def test_it_trains_validates_tests_and_reloads_without_a_strategy_of_ours(tmp_path):
    torch.manual_seed(0)
    data = SyntheticDataModule(3, [100, 50, 25], num_dense=4, batch_size=256, num_batches=60, num_val_batches=8)
    model = DLRM(data.table_sizes, data.num_dense, learning_rate=0.01, table_learning_rate=0.1, table_device="cpu")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val_auc"] > 0.75
    assert trainer.callback_metrics["val_ne"] < 0.9
    assert 0 < trainer.callback_metrics["train_loss"] < 0.7
    (results,) = trainer.test(model, datamodule=data, verbose=False)
    assert results.keys() == {"test_auc", "test_ne", "test_loss"}
    assert results["test_auc"] > 0.75

    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = DLRM.load_from_checkpoint(tmp_path / "model.ckpt", table_device="cpu", weights_only=True)
    batch = next(iter(data.val_dataloader()))
    assert torch.equal(again.eval()(batch), model.eval()(batch))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table_sizes": {}}, "at least one table"),
        ({"table_sizes": {"a": 0}}, "one row in each"),
        ({"num_dense": 0}, "num_dense=0"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
        ({"fused_optimizer": "adam", "table_learning_rate": 0.1}, "got: 'adam'\n  Pass rowwise_adagrad"),
        ({"fused_optimizer": "sgd"}, "needs a table_learning_rate"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DLRM(**{"table_sizes": TABLES, "num_dense": 5} | arguments)


def test_torchmetrics_is_told_which_way_a_metric_is_better():
    assert [metric.higher_is_better for metric in (BinnedAUC, NormalizedEntropy)] == [True, False]
    assert not any(metric.is_differentiable for metric in (BinnedAUC, NormalizedEntropy))
