"""`overlap-train` trains any module, and evaluates what the module and its data can evaluate."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.apps import build, config_checks

from .evaluated import OF_DATA, OF_MODULE, PARTS, train_with
from .test_conf import composed

SUBSETS = [parts for num in range(5) for parts in itertools.combinations(PARTS, num)]


def configured(parts: tuple[str, ...], *overrides: str) -> dict[str, Any]:
    config = composed("callbacks=none", "logger=none", "trainer.devices=1", *overrides)
    targets = {group: f"tests.apps.evaluated.make_{group}" for group in ("model", "data")}
    return config | {group: {"_target_": target, "parts": list(parts)} for group, target in targets.items()}


def test_any_module_is_trained_and_what_is_there_is_evaluated(get_ranks: Any, tmp_path: Path) -> None:
    ranks = get_ranks(1)
    for number, parts in enumerate(SUBSETS):
        config = configured(parts)
        config_checks.check(config)
        build.check(config)
        [(said, summary)] = ranks.run(train_with, config, tmp_path / str(number))
        evaluated = {f"{what.partition('_')[0]}_loss" for what in OF_DATA if is_evaluated(what, parts)}
        assert (summary["num_steps"], set(summary["metrics"])) == (3, evaluated), parts
        told = [line for line in said.splitlines() if line.startswith("no test after the training: ")]
        missing = {"test_step": "Ranker has no test_step.", "test_dataloader": "Clicks has no test_dataloader."}
        first = next((text for name, text in missing.items() if name not in parts), None)
        assert told == ([] if first is None else [f"no test after the training: {first}"]), parts
    ranks.close()  # a run of the command changes its process: threads, filters, log levels


def is_evaluated(loader: str, parts: tuple[str, ...]) -> bool:
    return loader in parts and dict(zip(OF_DATA, OF_MODULE, strict=True))[loader] in parts


@pytest.mark.parametrize("task", ["test", "validate"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_evaluation_of_what_is_not_there_is_refused(task: str, number: int, tmp_path: Path) -> None:
    missing = {"test": ("test_step", "test_dataloader"), "validate": ("validation_step", "val_dataloader")}[task][
        number
    ]
    (tmp_path / "last.ckpt").touch()
    config = configured(tuple(part for part in PARTS if part != missing), f"task={task}")
    with pytest.raises(ValueError, match=rf"task={task} needs what is not there: \w+ has no {missing}\."):
        build.check(config)
