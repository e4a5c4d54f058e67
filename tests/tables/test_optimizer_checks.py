"""What a user reads of a dense optimizer that owns fused tables, and of a fused optimizer's keywords."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import LAMB, RowWiseAdagrad, apply_optimizer_in_backward

from lightning_overlap import combined_optimizer
from lightning_overlap.tables import find_tables, optimizer_checks
from lightning_overlap.tables.optimizer_checks import (
    apply_fused_optimizer,
    refuse_dense_owner,
    warn_of_moves_on_zeros,
)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("way", ["plain", "combined", "scheduled"])
def test_the_line_to_write(name: str, way: str) -> None:
    table, dense = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        of_all = getattr(torch.optim, name)(parameters, lr=0.01)
        if way == "scheduled":
            torch.optim.lr_scheduler.LambdaLR(of_all, lambda step: 0.5)
        return combined_optimizer(nn.Module(), of_all) if way == "combined" else of_all

    with pytest.raises(ValueError, match="gave a dense optimizer the weights of fused tables: ebc") as info:
        refuse_dense_owner({"ebc": table}, [made([table, dense])])
    line = f"torch.optim.{name}(dense, lr=0.01)"
    expected = {
        "plain": f"return {line}\n",
        "combined": f"return combined_optimizer(self, {line})\n",
        "scheduled": f"optimizer = combined_optimizer(self, {line})  # for the scheduler",
    }
    assert expected[way] in str(info.value)
    assert ("on a CPU FBGEMM fuses no Adam" in str(info.value)) == (name == "AdamW")
    refuse_dense_owner({"ebc": table}, [made([dense])])


def test_an_unknown_keyword_of_a_table_is_named() -> None:
    """TorchRec passes it to the kernel."""
    model = nn.Module()
    configs = [EmbeddingBagConfig(name="t0", embedding_dim=4, num_embeddings=8, feature_names=["f0"])]
    model.ebc = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lrr": 1})
    with pytest.raises(ValueError, match=r"table ebc.t0: RowWiseAdagrad does not take 'lrr': .* Did you mean 'lr'"):
        apply_fused_optimizer(find_tables(model), None, torch.device("cpu"))


def test_tables_that_move_on_zeros_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU FBGEMM fuses none of their optimizers."""
    optimizers = {
        "adam": (torch.optim.Adam, {"lr": 0.1}),
        "lamb": (LAMB, {"lr": 0.1}),
        "decayed": (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.01, "weight_decay_mode": "l2"}),
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
        "rowwise": (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.0}),
    }
    model = nn.Module()
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=8, feature_names=[name]) for name in optimizers
    ]
    model.ebc = EmbeddingBagCollection(tables=configs)
    for name, optimizer in optimizers.items():
        apply_optimizer_in_backward(optimizer[0], model.ebc.embedding_bags[name].parameters(), optimizer[1])
    rules = {table.name: table.rule for table in find_tables(model)}
    model.ebc.trained_in_backward = rules
    monkeypatch.setattr(optimizer_checks, "sharded_modules", lambda model: {"ebc": model.ebc})
    with pytest.warns(UserWarning, match=r"of adam \(Adam\), lamb \(LAMB\), decayed \(RowWiseAdagrad\) change rows"):
        warn_of_moves_on_zeros(model)
    model.ebc.trained_in_backward = {name: rules[name] for name in ("sgd", "adagrad", "rowwise")}
    warn_of_moves_on_zeros(model)  # a warning would be an error
