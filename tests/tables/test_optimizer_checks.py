"""What a user reads of a dense optimizer that owns fused tables, and of a fused optimizer's keywords."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward

from lightning_overlap import combined_optimizer
from lightning_overlap.tables import check_fused_optimizer, find_tables
from lightning_overlap.tables.optimizer_checks import apply_fused_optimizer, keep_dense, refuse_dense_owner


@pytest.mark.parametrize(
    ("optimizer", "line", "on_cpu"),
    [
        (torch.optim.AdamW, "return torch.optim.AdamW(dense, lr=0.01)", True),
        (torch.optim.SGD, "return torch.optim.SGD(dense, lr=0.01)", False),
    ],
)
@pytest.mark.parametrize("combined", [False, True])
def test_the_line_to_write(optimizer: type[torch.optim.Optimizer], line: str, on_cpu: bool, combined: bool) -> None:
    table, dense = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        of_all = optimizer(parameters, lr=0.01)  # type: ignore[call-arg]
        return combined_optimizer(nn.Module(), of_all) if combined else of_all

    with pytest.raises(ValueError, match="gave a dense optimizer the weights of fused tables: ebc") as info:
        refuse_dense_owner({"ebc": table}, [made([table, dense])])
    if combined:
        line = line.replace("return ", "return combined_optimizer(self, ") + ")"
    assert f"{line}\n" in str(info.value)
    assert ("on a CPU FBGEMM fuses no Adam" in str(info.value)) == on_cpu
    refuse_dense_owner({"ebc": table}, [made([dense])])


BAG, SEQUENCE = "m.ebc.embedding_bags.t0.weight", "m.ec.embeddings.t1.weight"
TO_TRAIN = "To train tables by configure_optimizers, with its state, whole on every rank: sharding="
FILTERED = "and in_backward_optimizer_filter in configure_optimizers"
NEEDS_FUSED = f"On a CPU tables of an EmbeddingCollection need a fused optimizer: {SEQUENCE}."


@pytest.mark.parametrize(
    ("names", "fused_only", "way"),
    [
        ([BAG, SEQUENCE], [], f"{TO_TRAIN}'data_parallel', and no fused_optimizer."),
        ([BAG, SEQUENCE], [SEQUENCE], f"{TO_TRAIN}{{'t0': 'data_parallel'}}, {FILTERED}. {NEEDS_FUSED}"),
        ([SEQUENCE], [SEQUENCE], NEEDS_FUSED),
    ],
)
def test_what_keeps_a_table_for_the_dense_optimizer(names: list[str], fused_only: list[str], way: str) -> None:
    assert keep_dense(names, fused_only) == way


def test_a_schedule_of_such_an_optimizer_is_told_of_the_combined_one() -> None:
    table = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([table], lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    line = r"\n  optimizer = combined_optimizer\(self, torch.optim.SGD\(dense, lr=0.01\)\)  # for the scheduler"
    with pytest.raises(ValueError, match=line):
        refuse_dense_owner({"ebc": table}, [optimizer])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((RowWiseAdagrad, {"lrr": 1}), "fused_optimizer: RowWiseAdagrad does not take 'lrr': .* Did you mean 'lr'"),
        ((torch.optim.SGD, {"rate": 1}), "SGD does not take 'rate': .* Known: lr, momentum, weight_decay."),
    ],
)
def test_an_unknown_keyword_is_named(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_fused_optimizer(given)
    kept: tuple[Any, dict[str, Any]] = (RowWiseAdagrad, {"lr": 1.0, "gradient_clipping": True, "max_gradient": 0.5})
    assert check_fused_optimizer(kept) == kept


def test_an_unknown_keyword_of_a_table_is_named() -> None:
    """TorchRec passes it to the kernel."""
    model = nn.Module()
    configs = [EmbeddingBagConfig(name="t0", embedding_dim=4, num_embeddings=8, feature_names=["f0"])]
    model.ebc = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lrr": 1})
    with pytest.raises(ValueError, match=r"table ebc.t0: RowWiseAdagrad does not take 'lrr': .* Did you mean 'lr'"):
        apply_fused_optimizer(find_tables(model), None, torch.device("cpu"))
