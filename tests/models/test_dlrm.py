"""DLRM as a TorchRec user's module: its forward, who owns which parameter, and its metrics against plain references."""

import math
from types import SimpleNamespace

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


def test_the_lookup_is_issued_before_the_bottom_mlp_and_read_after_it():
    """By name: a sharded collection may answer in another order."""
    model, batch, events = model_of(), batch_of(), []
    expected = model(batch)

    def read(pooled: KeyedTensor) -> dict[str, Tensor]:
        events.append("read")
        return dict(reversed(pooled.to_dict().items()))

    def issue(module, args, pooled: KeyedTensor) -> SimpleNamespace:
        events.append("issued")
        return SimpleNamespace(to_dict=lambda: read(pooled))

    model.ebc.register_forward_hook(issue)
    model.bottom.register_forward_hook(lambda *_: events.append("bottom"))
    assert torch.equal(model(batch), expected)
    assert events == ["issued", "bottom", "read"]


def test_tables_are_on_meta_and_a_shard_of_one_begins_at_the_scale_of_the_whole_table():
    model = DLRM({"a": 10_000}, num_dense=2)
    assert [name for name, weight in model.named_parameters() if weight.is_meta] == ["ebc.embedding_bags.a.weight"]
    (config,) = model.ebc.embedding_bag_configs()
    shard = config.init_fn(torch.empty(100, 16))
    assert 0.0099 < shard.abs().max() <= 0.01


@pytest.mark.parametrize("rate", [0.1, None])
def test_the_dense_optimizer_takes_tables_that_nothing_else_updates(rate):
    model = model_of(table_learning_rate=rate)
    owned = {id(weight) for group in model.configure_optimizers().param_groups for weight in group["params"]}
    left_out = {name for name, weight in model.named_parameters() if id(weight) not in owned}
    assert left_out == {name for name, _ in model.named_parameters() if rate and name.startswith("ebc")}


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


def test_the_binned_auc_resolves_rare_clicks_and_torchmetrics_knows_what_is_better():
    torch.manual_seed(0)
    logits = torch.randn(5000) - 6  # probabilities around 0.002
    labels = (torch.rand(5000) < torch.sigmoid(logits + 3)).float()
    metric = BinnedAUC()
    metric.update(logits, labels)
    assert metric.compute().item() == pytest.approx(pairwise_auc(logits.tolist(), labels.int().tolist()), abs=1e-4)
    assert [metric.higher_is_better for metric in (BinnedAUC, NormalizedEntropy)] == [True, False]


def test_a_layer_to_the_embedding_dim_is_added_only_where_it_is_missing():
    for layers, widths in (((8, 4), [8, 4]), ((8,), [8, 4])):
        assert [m.out_features for m in model_of(bottom_layers=layers).bottom if hasattr(m, "out_features")] == widths
    assert model_of(bottom_layers=(), top_layers=())(batch_of()).shape == (16,)


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
    (results,) = trainer.test(model, datamodule=data, verbose=False)
    assert results.keys() == {"test_auc", "test_ne", "test_loss"}

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
