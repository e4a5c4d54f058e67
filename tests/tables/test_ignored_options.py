"""An option that nothing takes is refused by name, or said."""

from typing import Any

import torch

from ..support.ranks import Ranks
from .ignored_options import SGD, said

OPTIONS: dict[str, dict[str, Any]] = {
    "fused_optimizer=": {"fused_optimizer": SGD},
    "sharding=": {"sharding": "row_wise"},
    "replicate_tables=": {"replicate_tables": 1000},
    "fused_optimizer=, sharding=": {"fused_optimizer": SGD, "sharding": "table_wise", "replicate_tables": False},
}
NAMED = ({"sharding": {"a0": "row_wise"}}, {"replicate_tables": ["a0"]})
QUIET = {"replicate_tables": False}
UNUSED = "fused_optimizer= of the strategy has no effect"


def test_options_that_nothing_takes_are_refused_or_said(two_ranks: Ranks) -> None:
    cases: dict[str, tuple[dict[str, str], dict[str, Any]]] = {}
    for kinds in ({"a": "wrapped"}, {"a": "wrapped", "b": "wrapped"}):
        cases |= {f"{len(kinds)} {name}": (kinds, options) for name, options in OPTIONS.items()}
    mixed = {"a": "wrapped", "b": "plain"}
    cases |= {f"named {next(iter(one))}": (mixed, {"fused_optimizer": SGD, **one}) for one in NAMED}
    cases |= {
        "nothing asked": ({"a": "wrapped"}, QUIET),
        "mixed": (mixed, {"fused_optimizer": SGD, **QUIET}),
        "codecs": ({"a": "wrapped"}, {"quantized_comms": "fp16"}),
        "no such table": ({"a": "plain"}, {"fused_optimizer": SGD, "sharding": {"tabel": "row_wise"}}),
        "applied": ({"a": "applied"}, {"fused_optimizer": SGD, **QUIET}),
        "applied alike": ({"a": "applied"}, {"fused_optimizer": (torch.optim.SGD, {"lr": 0.25}), **QUIET}),
        "one applied": ({"a": "applied", "b": "plain"}, {"fused_optimizer": SGD, **QUIET}),
        "one frozen": ({"a": "applied", "b": "frozen"}, {"fused_optimizer": SGD, **QUIET}),
        "made fused": ({"a": "fused"}, {"fused_optimizer": SGD, **QUIET}),
        "data-parallel": ({"a": "plain"}, {"fused_optimizer": SGD, "sharding": "data_parallel", **QUIET}),
        "no table": ({}, {"fused_optimizer": SGD, "sharding": "row_wise", "async_checkpoint": True}),
        "no table, nothing asked": ({}, {}),
    }
    found, of_rank_1 = two_ranks.run(said, cases, timeout_s=240)
    for number in (1, 2):
        for option in OPTIONS:
            text = found[f"{number} {option}"]
            assert text == of_rank_1[f"{number} {option}"]
            whose = ", ".join(f"{name} (a DistributedModelParallel)" for name in "ab"[:number])
            assert text.startswith(f"ValueError: {option} of the strategy has no effect on {whose}: it is"), text
    for option in ("sharding", "replicate_tables"):
        assert found[f"named {option}"].startswith(f"ValueError: {option}: table 'a0' is named, and nothing shards it.")
        assert "a table of a (a DistributedModelParallel)" in found[f"named {option}"]
    for case in ("nothing asked", "mixed"):  # TorchRec's own optimizer, whose kernel may be the other rank's
        assert ", trained by EXACT_SGD of its kernel, lr 0.01" in found[case]
        assert found[case].count("no option of the strategy for tables has an effect on it") == 1
    assert "b: b0: " in found["mixed"]
    assert "trained by SGD in the backward, lr 0.5" in found["mixed"]
    assert "quantized_comms: a" in found["codecs"]
    assert "Did you mean" in found["no such table"] or "Known: a0" in found["no such table"]
    unused = [case for case, text in found.items() if UNUSED in text and not text.startswith("ValueError")]
    assert unused == ["applied", "made fused", "data-parallel"]
    assert "trained by EXACT_SGD of its kernel, lr 0.75" in found["made fused"]
    assert "fused_optimizer=, sharding=, async_checkpoint= of the strategy has no effect: the" in found["no table"]
    assert "has no effect" not in found["no table, nothing asked"]
