"""SparseNN: pooled rows of every table side by side under one over arch, without a strategy around it."""

import pytest
import torch

from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import SparseNN


def data() -> SyntheticDataModule:
    return SyntheticDataModule(num_tables=3, rows_per_table=[5, 7, 9], num_dense=2, batch_size=4)


def model(**options: object) -> SparseNN:
    made = data()
    options = {"embedding_dim": 8, "over_layers": (6, 5), "table_device": "cpu"} | options
    return SparseNN(made.table_sizes, made.num_dense, **options)  # type: ignore[arg-type]


def test_tables_of_other_widths_dense_layers_and_normalized_layers() -> None:
    torch.manual_seed(0)
    net = model(embedding_dim_of={"cat_1": 12}, dense_layers=(4, 3), swish_layer_norm=True, table_learning_rate=0.1)
    assert [table.embedding_dim for table in net.ebc.embedding_bag_configs()] == [8, 12, 8]
    batch = next(iter(data().train_dataloader()))
    pooled = net.ebc(batch.sparse).to_dict()
    hidden = torch.cat([net.bottom[1](net.bottom[0](batch.dense)), *(pooled[f"cat_{i}"] for i in range(3))], dim=1)
    for linear in (net.top[0][0], net.top[0][2]):  # type: ignore[index]
        hidden = linear(hidden)
        hidden = hidden * torch.sigmoid(torch.nn.functional.layer_norm(hidden, hidden.shape[1:]))
    torch.testing.assert_close(net(batch), net.top[1](hidden).squeeze(1))
    dense = [*net.bottom.parameters(), *net.top.parameters()]
    [group] = net.configure_optimizers().param_groups
    assert {id(weight) for weight in group["params"]} == {id(weight) for weight in dense}, "wide tables are fused, too"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_dim_of": {"cat_9": 4}}, "got: 'cat_9'"),
        ({"embedding_dim_of": {"cat_1": 0}}, r"\[cat_1\] must be at"),
        ({"fused_optimizer": "adamw", "table_learning_rate": 0.1}, "fused_optimizer is unknown to this model"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_rows_are_multiplied_by_the_weights_of_their_ids() -> None:
    torch.manual_seed(0)
    net = model(weighted=True, table_learning_rate=0.1)
    weighted = SyntheticDataModule(num_tables=3, rows_per_table=[5, 7, 9], num_dense=2, batch_size=4, weighted=True)
    batch = next(iter(weighted.train_dataloader()))
    pooled = net.ebc(batch.sparse)["cat_1"]
    table = net.ebc.embedding_bags["cat_1"].weight
    part = batch.sparse["cat_1"]
    rows = table[part.values()] * part.weights().unsqueeze(1)
    bags = torch.repeat_interleave(torch.arange(4), part.lengths())
    torch.testing.assert_close(pooled, torch.zeros(4, 8).index_add(0, bags, rows))
