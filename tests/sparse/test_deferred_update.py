"""A deferred update that is made part by part."""

from __future__ import annotations

import torch

from lightning_overlap.sparse.deferred_update import DeferredUpdate, _Backward, _Cut


def test_all_parts_are_told_in_order_also_where_a_rank_has_nothing_to_update_in_one() -> None:
    """After each part all ranks start the all-to-all of its next embeddings: the order must not depend on a rank."""
    table = torch.ones(2, requires_grad=True)
    graph = table * 3
    leaf = graph.detach().requires_grad_()
    leaf.grad = torch.ones(2)
    update = DeferredUpdate()
    update._under_way = [_Cut(graph, leaf, None, part=1)]
    update._sent = _Backward([])
    told: list[tuple[int, bool]] = []
    update.apply([0, 1, 2], lambda part: told.append((part, table.grad is not None)))
    assert told == [(0, False), (1, True), (2, True)]
    assert not update
