"""`overlap-train`: compose a config, check it, start the ranks, and hand a metric back to a sweep."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import choices, launch
from .modes import unknown_name_message

_OPTION = re.compile(r"(data|model|trainer|pipeline|stream|sharding|logger|callbacks|strategy)\.[\w.]+=")
_CHOICE = re.compile(r"(?P<group>\w+)=(?P<names>[\w,]+)")


def main() -> None:
    """Run the command; this is the entry point `overlap-train`."""
    arguments = sys.argv[1:]
    for message in _unknown_choices(arguments):
        _fail(message, exit_code=2)
    sys.argv[1:] = map(add_or_override, arguments)
    if launch.under_launcher() and launch.rank() != 0:
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]  # one run folder is enough
    _hydra_main()


def add_or_override(argument: str) -> str:
    """Let `data.batch_size=8` set an option that no config file names: defaults live in Python, so few are named."""
    return f"++{argument}" if _OPTION.match(argument) else argument


@hydra.main(version_base="1.3", config_path="pkg://lightning_overlap.conf", config_name="config")
def _hydra_main(composed: DictConfig) -> float | None:
    try:
        return _job(_plain(composed), Path(HydraConfig.get().runtime.output_dir))
    except launch.InterruptedRunError as err:
        _fail(str(err), err.exit_code)
    except launch.RankFailedError as err:
        _fail(str(err))
    except (ValueError, TypeError, OSError, ImportError) as err:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        _fail(f"{type(err).__name__}: {err}")
    return None


def _job(config: dict[str, Any], folder: Path) -> float | None:
    choices.check(config)
    from . import rank, recipe, report  # torch takes seconds to import: wrong names have been answered by now

    recipe.check(config)
    config = recipe.complete(config)
    if launch.rank() == 0:
        rank.write_config(config, folder)
    if launch.under_launcher():
        rank.train(config, folder)
        return report.read_metric(folder) if launch.rank() == 0 else None
    num_ranks = recipe.num_ranks(config)
    print(_headline(config, num_ranks), flush=True)
    launch.run_ranks(num_ranks, "lightning_overlap.rank", folder)
    return report.read_metric(folder)


def _headline(config: dict[str, Any], num_ranks: int) -> str:
    model, data = (config[group]["_target_"].rpartition(".")[2] for group in ("model", "data"))
    modes = [schedule.name for schedule in choices.modes(config)]
    sharding = config["sharding"].get("type") or "planner"
    return (
        f"overlap-train: {model} on {data}, {num_ranks} ranks, pipeline {', '.join(modes)}, "
        f"stream {config['stream']['name']}, sharding {sharding}"
    )


def _plain(composed: DictConfig) -> dict[str, Any]:
    """The config as plain containers.

    Raises:
        ValueError: A value that has to be given is missing, or an interpolation fails.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as err:
        raise ValueError(f"{str(err).splitlines()[0]}. Give it on the command line: {err.full_key}=...") from err
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _unknown_choices(arguments: Sequence[str]) -> Iterator[str]:
    """Say which `group=name` names no config file, with the nearest names; Hydra alone lists all of them."""
    own = [Path(folder) for folder in _config_dirs(arguments)]
    for argument in arguments:
        choice = _CHOICE.fullmatch(argument)
        folders = [folder / choice["group"] for folder in (files(__package__) / "conf", *own)] if choice else []
        known = {
            file.name.removesuffix(".yaml"): file
            for folder in folders
            if folder.is_dir()
            for file in sorted(folder.iterdir(), key=lambda file: file.name)
            if file.name.endswith(".yaml")
        }
        for name in choice["names"].split(",") if choice and known else ():
            if name not in known and name != "null":
                yield unknown_name_message(choice["group"] if choice else "", name, known)


def _config_dirs(arguments: Sequence[str]) -> Iterator[str]:
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            yield value if equals else "".join(arguments[place + 1 : place + 2])


def _fail(message: str, exit_code: int = 1) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
