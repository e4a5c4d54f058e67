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


def assign(costs: NDArray[np.floating]) -> Ints:
    """Return the rank that each sample goes to, `(R, B)`, from the samples' costs by rank, `(R, B)`, none negative.

    Each rank gets B samples. First pairs of samples are exchanged between a heavy and a light rank, which moves few. If
    the heaviest rank stays more than `CLOSE` above the mean, the differencing method of Karmarkar and Karp with equal
    numbers (BLDM: Michiels, Korst, Aarts, van Leeuwen, 2003), improved by the same exchanges, counts if it is better.
    """
    whole = _whole_numbers(costs)
    num_ranks, num_samples = whole.shape
    stay = np.repeat(np.arange(num_ranks), num_samples).reshape(whole.shape)
    total = int(whole.sum())
    if num_ranks == 1 or num_samples == 0 or total == 0:
        return stay
    few = _exchange_pairs(whole, stay)
    heaviest = _heaviest(whole, few)
    # No assignment is better than the heaviest sample with the lightest others.
    least = int(whole.max()) + int(np.partition(whole, num_samples - 1, axis=None)[: num_samples - 1].sum())
    if heaviest <= max(least, _light_enough(total, num_ranks)):
        return few
    others = _exchange_pairs(whole, _keep_most(_differencing(whole), num_ranks))
    return others if _heaviest(whole, others) < heaviest else few


def loads(costs: NDArray[np.floating], ranks: Ints) -> NDArray[np.float64]:
    """Return the cost of each rank, `(R,)`, under an assignment."""
    return np.bincount(ranks.ravel(), weights=costs.ravel(), minlength=len(costs)).astype(np.float64)


def _whole_numbers(costs: NDArray[np.floating]) -> Ints:
    exact = costs.astype(np.float64)
    largest = float(exact.max(initial=0.0))
    return np.rint(exact * (_LARGEST / largest) if largest else exact).astype(np.int64)


def _light_enough(total: int, num_ranks: int) -> int:
    return int(total / num_ranks * (1 + CLOSE))


def _loads(whole: Ints, ranks: Ints) -> Ints:
    found = np.zeros(len(whole), np.int64)
    np.add.at(found, ranks.ravel(), whole.ravel())
    return found


def _heaviest(whole: Ints, ranks: Ints) -> int:
    return int(_loads(whole, ranks).max())


def _exchange_pairs(whole: Ints, ranks: Ints) -> Ints:
    """Exchange a sample of the heaviest rank for a lighter one of a light rank, until that helps no more."""
    flat, num_ranks = whole.ravel(), len(whole)
    order = np.argsort(flat, kind="stable")
    by_rank = order[np.argsort(ranks.ravel()[order], kind="stable")].reshape(whole.shape)  # samples, by rank and cost
    load = flat[by_rank].sum(axis=1)
    total = int(load.sum())
    enough, mean = _light_enough(total, num_ranks), total // num_ranks
    for _ in range(8 * num_ranks + 64):
        heavy = int(load.argmax())
        if load[heavy] <= enough:
            break
        for light in np.argsort(load, kind="stable"):
            gap = int(load[heavy] - load[light])
            wanted = max(1, min(int(load[heavy]) - mean, mean - int(load[light])))
            pair = _best_pair(flat[by_rank[heavy]], flat[by_rank[light]], wanted, gap)
            if pair is not None:
                break
        else:
            break
        given, taken, moved = pair
        by_rank[heavy][given], by_rank[light][taken] = by_rank[light][taken], by_rank[heavy][given]
        load[heavy] -= moved
        load[light] += moved
        for rank in (heavy, light):
            by_rank[rank] = by_rank[rank][np.argsort(flat[by_rank[rank]], kind="stable")]
    found = np.empty(flat.shape, np.int64)
    found[by_rank.ravel()] = np.repeat(np.arange(num_ranks), whole.shape[1])
    return found.reshape(whole.shape)


def _best_pair(heavy: Ints, light: Ints, wanted: int, gap: int) -> tuple[int, int, int] | None:
    """Return (place in `heavy`, place in `light`, difference): nearest to `wanted`, above 0 and below `gap`.

    Both have ascending costs.
    """
    after = np.searchsorted(light, heavy - wanted)
    best = None
    for places in (np.maximum(after - 1, 0), np.minimum(after, len(light) - 1)):
        difference = heavy - light[places]
        error = np.where((difference > 0) & (difference < gap), np.abs(difference - wanted), np.iinfo(np.int64).max)
        place = int(error.argmin())
        if 0 < difference[place] < gap and (best is None or error[place] < best[0]):
            best = int(error[place]), place, int(places[place]), int(difference[place])
    return None if best is None else best[1:]


def _differencing(whole: Ints) -> Ints:
    """Return a part for each sample, `(R, B)`: R parts of B samples with near-equal sums."""
    num_ranks, num_samples = whole.shape
    flat = whole.ravel()
    order = np.argsort(-flat, kind="stable")
    groups = order.reshape(num_samples, num_ranks)  # each part gets one sample of each group
    sums: list[Ints] = list(flat[groups])  # of the parts of a node, descending
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
        own[descending] = parts.pop(num_samples + number)
        parts[first], parts[second] = own, own[::-1]
    found = np.empty(flat.shape, np.int64)
    for number, group in enumerate(groups):
        found[group] = parts[number]
    return found.reshape(whole.shape)


def _keep_most(parts: Ints, num_ranks: int) -> Ints:
    """Number the parts by ranks, so that many samples stay: greedily, the largest overlap first."""
    overlap = np.zeros((num_ranks, num_ranks), np.int64)  # of a part with a rank
    np.add.at(overlap, (parts, np.arange(num_ranks)[:, None]), 1)
    rank_of = np.full(num_ranks, -1)
    taken = np.zeros(num_ranks, bool)
    for place in np.argsort(-overlap.ravel(), kind="stable"):
        part, rank = divmod(int(place), num_ranks)
        if rank_of[part] < 0 and not taken[rank]:
            rank_of[part], taken[rank] = rank, True
    return rank_of[parts]
