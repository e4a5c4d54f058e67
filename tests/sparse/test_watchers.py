"""A watcher is told the events that its class overrides, and no others."""

from typing import Any

from lightning_overlap.sparse.watchers.watcher import Watcher, Watchers


class CountsBackwards(Watcher):
    def __init__(self) -> None:
        self.num = 0

    def backward_begins(self) -> None:
        self.num += 1


def lists_with(watchers: Watchers, watcher: Watcher) -> set[str]:
    return {event for event, watching in vars(watchers).items() if watcher in watching}


def test_every_event_has_a_list() -> None:
    assert set(vars(Watchers())) == {name for name in vars(Watcher) if not name.startswith("_")}


def test_a_list_holds_those_that_want_the_event() -> None:
    watchers, watcher = Watchers(), CountsBackwards()
    watchers.add(watcher)
    assert lists_with(watchers, watcher) == {"backward_begins"}
    watchers.remove(watcher)
    assert lists_with(watchers, watcher) == set()
    watchers.remove(watcher)  # one that is not told anything


def test_an_event_is_told_in_the_order_in_which_watchers_came() -> None:
    """The guard of losses comes after those that look at gradients as they are."""
    watchers, added = Watchers(), [CountsBackwards() for _ in range(3)]
    for watcher in added:
        watchers.add(watcher)
    told: list[Any] = watchers.backward_begins
    assert told == added
