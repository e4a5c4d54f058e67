"""The sparse stages without ranks: what waits for what, which states of a batch can follow, options."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torchrec.distributed import dist_data

from lightning_overlap.compat.torchrec import ids
from lightning_overlap.sparse import SparseOptions
from lightning_overlap.sparse.deferred_update import DeferredUpdate, _Backward, _Gap
from lightning_overlap.sparse.flight import SparseFlight
from lightning_overlap.sparse.module_flight import ModuleFlight, Progress
from lightning_overlap.tables import sharded_module

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks


def test_sizes_and_ids_are_sent_after_what_the_input_dists_stream_has_made() -> None:
    """Otherwise ranks would be sent lengths that are not there yet, and assemble ids by them."""
    log: list[str] = []
    streams = SimpleNamespace(order=lambda first, then: log.append(f"{then} after {first}"))
    unused: Any = dict.fromkeys(("discovery", "forwards", "exchange", "backward_fill", "updates", "last_calls"))
    flight = SparseFlight(0, None, shared=SimpleNamespace(streams=streams), **unused)  # type: ignore[arg-type]
    flight.sizes = "under way"
    with (
        mock.patch.object(SparseFlight, "send_ids", side_effect=lambda: log.append("sent")),
        mock.patch.object(SparseFlight, "receive_ids", side_effect=lambda: log.append("received")),
    ):
        flight.drain()
    assert log == ["compute after data_dist", "sent", "received"]


def test_the_stream_of_prefetches_is_forgotten_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward would wait for the stream of the first strategy, while another one's prefetch fills the cache."""
    kernel = SimpleNamespace(lxu_cache_locations_list=[], timesteps_prefetched=[], prefetched_info_list=[])
    kernel.prefetch_stream = "the first strategy's"
    for name in ("tbes", "caching_tbes"):
        monkeypatch.setattr(sharded_module, name, lambda module: [kernel])
    sharded_module.forget_prefetched(nn.Module())
    assert kernel.prefetch_stream is None


def test_all_parts_are_named_in_order_also_where_a_rank_has_nothing_to_update_in_one() -> None:
    """After each part all ranks start the all-to-all of its next embeddings: the order must not depend on a rank."""
    table = torch.ones(2, requires_grad=True)
    graph = table * 3
    leaf = graph.detach().requires_grad_()
    leaf.grad = torch.ones(2)
    update = DeferredUpdate()
    update._gaps = [_Gap(graph, leaf, None, part=1)]
    update._sent = _Backward([])
    named: list[tuple[int, bool]] = []
    update.apply_parts([0, 1, 2], lambda part: named.append((part, table.grad is not None)))
    assert named == [(0, False), (1, True), (2, True)]
    assert not update


def test_no_time_to_wait_for_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s is a time to wait for other ranks, got 0"):
        SparseOptions(timeout_s=0)


def test_a_rate_that_moves_keeps_cached_tables_from_early_lookups() -> None:
    assert SparseOptions(prefetches=True).looks_up_cached
    assert not SparseOptions(prefetches=True, set_rates=lambda: None).looks_up_cached


SENT, RECEIVED, LOOKED_UP, SERVED, DROPPED, UPDATED = Progress
FOLLOW = {(SENT, RECEIVED), (RECEIVED, LOOKED_UP), (LOOKED_UP, SERVED), (SERVED, UPDATED), (UPDATED, UPDATED)}
FOLLOW |= {(SENT, DROPPED), (RECEIVED, DROPPED), (LOOKED_UP, DROPPED)}


@pytest.mark.parametrize("present", Progress, ids=str)
@pytest.mark.parametrize("to", Progress, ids=str)
def test_only_some_states_can_follow_a_state(present: Progress, to: Progress) -> None:
    state = ModuleFlight(name="ebc", batch=7, module=None, kjt=Any, shared=Any, progress=present)  # type: ignore[arg-type]
    if (present, to) in FOLLOW:
        state.advance(to)
        assert state.progress is to
    else:
        with pytest.raises(RuntimeError, match=f"batch 7 in module 'ebc' cannot become {to}: it is {present}, and"):
            state.advance(to)
        assert state.progress is present


def count_recats() -> list[int]:
    """Return how often TorchRec had made its index of received features after each step of a fit."""
    made: list[Any] = []
    counts: list[int] = []
    own = dist_data._get_recat

    class Counts(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            counts.append(len(made))

    def counted(*args: Any, **kwargs: Any) -> Any:
        if (args or (kwargs["local_split"],))[0]:  # else it makes none
            made.append(args)
        return own(*args, **kwargs)

    with mock.patch.object(dist_data, "_get_recat", counted), mock.patch.object(ids, "_get_recat", counted):
        model = Model(TABLE_WISE)
        make_trainer(make_strategy(model), callbacks=[Counts()]).fit(model, datamodule=Batches(TABLE_WISE, 6))
    return counts


def test_the_index_of_received_features_is_not_made_in_each_step(ranks: Ranks) -> None:
    """On a device its copy would make the host wait, also on one rank."""
    for counts in ranks.run(count_recats):
        assert counts[2:] == [counts[1]] * 4
