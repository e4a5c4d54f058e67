"""Each break of the package can be made and undone, and its test exists; `make mutants` sees that the test fails."""

from pathlib import Path

import pytest

from .breaks import BREAKS, Break

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("mutant", BREAKS.values(), ids=lambda mutant: mutant.what)
def test_a_break_can_be_made_and_its_test_is_there(mutant: Break) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
    file, _, test = mutant.test.partition("::")
    assert f"def {test.partition('[')[0]}" in (TESTS / file).read_text(encoding="utf-8")
