"""Which rank gets which samples: equal numbers, near-equal cost, and few samples moved. The same on every rank.

Costs are whole numbers here, so that every rank computes the same sums, whatever its processor.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

CLOSE = 0.005
"""Above the mean by this part of it, the heaviest rank is light enough: more exchanges would only cost bytes."""
_LARGEST = 2.0**31  # that a sample's cost becomes: 2 ** 31 samples of it fit in an int64
_MOST_GROUPS = 128  # of the heaviest samples that are dealt out anew; each takes some 15 us of the training's thread


def assign(costs: NDArray[np.floating]) -> Ints:
    """Return the rank that each sample goes to, `(R, B)`, from the samples' costs by rank, `(R, B)`, none negative.

    Each rank gets B samples, and none moves if the heaviest rank is at most `CLOSE` above the mean. Otherwise samples
    are exchanged in pairs between a heavy and a light rank, which moves few. If the heaviest rank stays more than
    `CLOSE` above the best possible, the heaviest samples are dealt out anew by the differencing method of Karmarkar and
    Karp with equal numbers (BLDM: Michiels, Korst, Aarts, van Leeuwen, 2003), and pairs are exchanged again. That moves
    more samples, so it counts if it gains more than `CLOSE`.
    """
    whole = _whole_numbers(costs)
    num_ranks, num_samples = whole.shape
    stay = np.repeat(np.arange(num_ranks), num_samples).reshape(whole.shape)
    mean, heaviest = int(whole.sum()) / num_ranks, int(whole.sum(axis=1).max())
    if heaviest <= mean * (1 + CLOSE):
        return stay
    # No assignment is better than the heaviest sample with the lightest others.
    least = int(whole.max()) + int(np.partition(whole, num_samples - 1, axis=None)[: num_samples - 1].sum())
    enough = int(max(mean, least) * (1 + CLOSE))
    if heaviest <= enough:
        return stay
    few = _exchange_pairs(whole, stay, enough)
    heaviest = _heaviest(whole, few)
    if heaviest <= enough:
        return few
    others = _exchange_pairs(whole, _deal_out(whole), enough)
    return others if _heaviest(whole, others) < heaviest - mean * CLOSE else few


def loads(costs: NDArray[np.floating], ranks: Ints) -> NDArray[np.float64]:
    """Return the cost of each rank, `(R,)`, under an assignment."""
    return np.bincount(ranks.ravel(), weights=costs.ravel(), minlength=len(costs)).astype(np.float64)


def _whole_numbers(costs: NDArray[np.floating]) -> Ints:
    exact = costs.astype(np.float64)
    largest = float(exact.max(initial=0.0))
    return np.rint(exact / largest * _LARGEST if largest else exact).astype(np.int64)


def _loads(whole: Ints, ranks: Ints) -> Ints:
    found = np.zeros(len(whole), np.int64)
    np.add.at(found, ranks.ravel(), whole.ravel())
    return found


def _heaviest(whole: Ints, ranks: Ints) -> int:
    return int(_loads(whole, ranks).max())


def _exchange_pairs(whole: Ints, ranks: Ints, enough: int) -> Ints:
    """Exchange samples of the heaviest rank for lighter ones of a light rank, until it has `enough` or none helps."""
    flat, num_ranks = whole.ravel(), len(whole)
    by_rank = np.argsort(ranks.ravel(), kind="stable").reshape(whole.shape)  # samples
    ascends = np.zeros(num_ranks, bool)  # whether a rank's samples are in the order of their costs
    load = flat[by_rank].sum(axis=1)
    mean = int(load.sum()) // num_ranks

    def ascending(rank: int) -> Ints:
        if not ascends[rank]:
            by_rank[rank] = by_rank[rank][np.argsort(flat[by_rank[rank]], kind="stable")]
            ascends[rank] = True
        costs: Ints = flat[by_rank[rank]]
        return costs

    for _ in range(8 * num_ranks + 64):
        heavy = int(load.argmax())
        if load[heavy] <= enough:
            break
        for light in np.argsort(load, kind="stable"):
            gap = int(load[heavy] - load[light])
            wanted = max(1, min(int(load[heavy]) - mean, mean - int(load[light])))
            pairs = _best_pairs(ascending(heavy), ascending(light), wanted, gap)
            if pairs is not None:
                break
        else:
            break
        given, taken, moved = pairs
        by_rank[heavy, given], by_rank[light, taken] = by_rank[light, taken], by_rank[heavy, given]
        load[heavy] -= moved
        load[light] += moved
        ascends[[heavy, light]] = False
    found = np.empty(flat.shape, np.int64)
    found[by_rank.ravel()] = np.repeat(np.arange(num_ranks), whole.shape[1])
    return found.reshape(whole.shape)


def _best_pairs(heavy: Ints, light: Ints, wanted: int, gap: int) -> tuple[Ints, Ints, int] | None:
    """Return (places in `heavy`, places in `light`, difference): near `wanted`, above 0 and below `gap`.

    Both have ascending costs. It is the best pair, or several if that has less than half of `wanted`.
    """
    after = np.searchsorted(light, heavy - wanted)
    best = None
    for places in (np.maximum(after - 1, 0), np.minimum(after, len(light) - 1)):
        difference = heavy - light[places]
        error = np.where((difference > 0) & (difference < gap), np.abs(difference - wanted), np.iinfo(np.int64).max)
        place = int(error.argmin())
        if 0 < difference[place] < gap and (best is None or error[place] < best[0]):
            best = int(error[place]), place, int(places[place]), int(difference[place])
    if best is None:
        return None
    if best[3] < wanted / 2:  # the largest differences that together fit into `wanted`
        candidates = heavy[: np.searchsorted(heavy, light[0] + wanted, side="right")][::-1]
        differences = candidates - light[: len(candidates)]
        together = np.cumsum(differences[differences > 0])
        num = int(np.searchsorted(together, wanted, side="right"))
        if num:
            taken = np.arange(num)
            return len(candidates) - 1 - taken, taken, int(together[num - 1])
    return np.array([best[1]]), np.array([best[2]]), best[3]


def _deal_out(whole: Ints) -> Ints:
    """Return an assignment whose ranks have near-equal sums of the heaviest samples. Of the others few move."""
    num_ranks, num_samples = whole.shape
    num_groups = min(num_samples, _MOST_GROUPS)
    descending = np.argsort(-whole.ravel(), kind="stable")
    groups = descending[: num_groups * num_ranks].reshape(num_groups, num_ranks)
    parts = _differencing(whole.ravel()[groups])
    found = np.repeat(np.arange(num_ranks), num_samples)  # a rank's own samples
    found[groups] = _keep_most(parts, found[groups])[parts]
    # Each rank has got one sample of each group, and may have had more or less of them than others.
    light = descending[num_groups * num_ranks :][::-1]
    surplus = np.bincount(found, minlength=num_ranks) - num_samples
    given = [light[found[light] == rank][: surplus[rank]] for rank in np.flatnonzero(surplus > 0)]
    if given:
        found[np.concatenate(given)] = np.repeat(np.arange(num_ranks), np.maximum(-surplus, 0))
    return found.reshape(whole.shape)


def _differencing(groups: Ints) -> Ints:
    """Return a part for each of these costs, `(G, R)`, each row descending: R parts of G costs with near-equal sums."""
    num_groups, num_ranks = groups.shape
    sums: list[Ints] = list(groups)  # of the parts of a node, descending
    merged: list[tuple[int, int, Ints]] = []  # the two nodes of each later one, and the order of its parts
    heap = [(-int(one[0] - one[-1]), number) for number, one in enumerate(sums)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first), (_, second) = heapq.heappop(heap), heapq.heappop(heap)
        both = sums[first] + sums[second][::-1]  # the heavy parts of one with the light parts of the other
        descending = np.argsort(-both, kind="stable")
        sums.append(both[descending])
        merged.append((first, second, descending))
        heapq.heappush(heap, (-int(sums[-1][0] - sums[-1][-1]), len(sums) - 1))
    parts: dict[int, Ints] = {len(sums) - 1: np.arange(num_ranks)}
    for number in range(len(merged) - 1, -1, -1):
        first, second, descending = merged[number]
        own = np.empty(num_ranks, np.int64)
        own[descending] = parts.pop(num_groups + number)
        parts[first], parts[second] = own, own[::-1]
    return np.stack([parts[number] for number in range(num_groups)])


def _keep_most(parts: Ints, ranks: Ints) -> Ints:
    """Return a rank for each part, so that many samples stay on their `ranks`: greedily, the largest overlap first."""
    num_ranks = parts.shape[1]
    overlap = np.zeros((num_ranks, num_ranks), np.int64)  # of a part with a rank
    np.add.at(overlap, (parts, ranks), 1)
    some = np.flatnonzero(overlap)
    rank_of = np.full(num_ranks, -1)
    taken = np.zeros(num_ranks, bool)
    for place in some[np.argsort(-overlap.ravel()[some], kind="stable")].tolist():
        part, rank = divmod(place, num_ranks)
        if rank_of[part] < 0 and not taken[rank]:
            rank_of[part], taken[rank] = rank, True
    rank_of[rank_of < 0] = np.flatnonzero(~taken)
    return rank_of
