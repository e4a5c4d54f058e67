"""A module has what the newest request that has not ended asks for, whoever asks, however deep, in whatever order."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_overlap.tables import TRAINED, Request, ledger_of, next_version


class Averages:
    """A second set of weights, which are exchanged in place."""

    def __init__(self, module: nn.Linear, value: float) -> None:
        self.module, self.version = module, next_version()
        self.other = torch.full_like(module.weight, value)

    def exchange(self) -> None:
        with torch.no_grad():
            before = self.module.weight.clone()
            self.module.weight.copy_(self.other)
            self.other.copy_(before)


def value_of(module: nn.Linear) -> float:
    return float(module.weight.detach().unique().item())


@given(st.lists(st.tuples(st.sampled_from(["ask", "end"]), st.integers(0, 3), st.booleans()), max_size=30))
def test_the_newest_request_counts(steps: list[tuple[str, int, bool]]) -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, 0.0)
    averages = [None, *(Averages(module, float(number)) for number in (1, 2, 3))]
    ledger, going_on = ledger_of(module), list[tuple[Request, int, bool]]()
    for what, number, by_user in steps:
        if what == "ask":
            going_on.append((ledger.ask(averages[number], by_user=by_user), number, by_user))
        elif going_on:
            request, _, _ = going_on.pop(number % len(going_on))
            ledger.end(request)
            ledger.end(request)
        expected = going_on[-1][1] if going_on else 0
        of_user = [number for _, number, by_user in going_on if by_user]
        assert value_of(module) == expected
        assert ledger.asked is (averages[of_user[-1]] if of_user else None)
        assert (ledger.version == TRAINED) == (expected == 0)
        assert value_of(module) == (0 if ledger.inside is None else averages.index(ledger.inside))
    for request, _, _ in going_on:
        ledger.end(request)
    assert value_of(module) == 0
    assert [value_of_other(one) for one in averages[1:]] == [1, 2, 3]


def value_of_other(one: Averages | None) -> float:
    assert one is not None
    return float(one.other.unique().item())


def test_an_exchange_that_fails_leaves_no_request() -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, 0.0)
    averages, ledger = Averages(module, 1.0), ledger_of(module)
    averages.exchange = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ledger.ask(averages)
    assert ledger.inside is None
    assert ledger.asked is None
    with ledger.holding(None):
        assert value_of(module) == 0


def test_a_copy_has_trained_weights_of_its_own() -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, 0.0)
    with ledger_of(module).holding(Averages(module, 1.0), by_user=True):
        copied = copy.deepcopy(module)
        with pytest.raises(RuntimeError, match=r"this would train: ExponentialMovingAverage.averaged\(\) is active"):
            ledger_of(module).check_trained("this would train")
    assert (value_of(copied), value_of(module)) == (1, 0)
    ledger_of(copied).check_trained("this would train")


def test_a_ledger_keeps_no_module() -> None:
    module = nn.Linear(2, 2)
    assert ledger_of(module) is ledger_of(module)
    known = weakref.ref(module)
    del module
    gc.collect()
    assert known() is None
