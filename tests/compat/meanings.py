"""Mark tests with the private names whose meaning they test."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Meanings:
    """The private names of a library that have a test."""

    def __init__(self) -> None:
        self.tested: set[str] = set()

    def of(self, *names: str) -> Callable[[F], F]:
        """Return a decorator of a test that is about these names, each `Owner.name` as in `PRIVATE_NAMES`."""
        self.tested.update(names)
        return lambda test: test

    def without_test(self, listed: Mapping[str, tuple[str, ...]]) -> set[str]:
        """Return the listed names without a test, and the tested names that are not listed."""
        return {f"{owner}.{name}" for owner, names in listed.items() for name in names} ^ self.tested
