"""What a user reads whose dense optimizer owns fused tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_overlap import combined_optimizer
from lightning_overlap.tables.optimizer_checks import refuse_dense_owner


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
