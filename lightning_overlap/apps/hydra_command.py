"""Shared parts of the Hydra commands: options that no config file names, running on all ranks, one-line errors."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ..distributed import is_printed_last
from ..schedules import mode_printed_as, unknown_mode_message
from ..text import unknown_name_message
from . import build, config_checks, launch

_OPTION = re.compile(r"(data|model|trainer|pipeline|stream|sharding|comms|logger|callbacks|strategy|latency)\.[\w.]+=")
_EXPERIMENT = "experiment"  # a config group without a key of its own
_WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


def main(hydra_main: Callable[[], Any]) -> None:
    """Run a Hydra command with the arguments of this process."""
    sys.argv[1:] = map(add_or_override, sys.argv[1:])
    if launch.under_launcher() and launch.rank() != 0:
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]  # one run folder is enough
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors; without this it prints some tracebacks itself
    try:
        hydra_main()
    except (HydraException, OmegaConfBaseException, OSError) as err:
        if isinstance(err, MissingConfigException) and err.options:
            group, _, name = str(err.missing_cfg_file).rpartition("/")
            _fail(_unknown_choice(group, name, err.options), exit_code=2)
        if (unknown := _unknown_key(err.__cause__)) is not None:
            _fail(unknown, exit_code=2)
        if _WANTS_TRACEBACK:
            raise
        if isinstance(err, OSError):
            _fail(
                f"{type(err).__name__}: {err}: the run folder cannot be written. Start the command in a writable "
                "folder, or set hydra.run.dir=/a/folder (with -m hydra.sweep.dir=/a/folder)."
            )
        because = f"\n{err.__cause__}" if isinstance(err.__cause__, OmegaConfBaseException) else ""
        _fail(f"{err}{because}")


def _unknown_key(err: BaseException | None) -> str | None:
    """Return the message for an override whose key no config has; None if `err` is about something else."""
    if not isinstance(err, ConfigAttributeError | ConfigKeyError) or not isinstance(err.parent_node, DictConfig):
        return None
    key = str(err.full_key)
    above, _, name = key.rpartition(".")
    if above:
        return unknown_name_message("key", key, [f"{above}.{known}" for known in map(str, err.parent_node)])
    own = "" if "/" in name else f" To add a key of your own, write +{name}=..."
    return unknown_name_message("key", name, [*map(str, err.parent_node), _EXPERIMENT]) + own


def _refuse_added_typos(composed: DictConfig) -> None:
    """Refuse `+pipline=base`: it would add a key that nothing reads, beside the one that was meant."""
    given = [override.partition("=")[0] for override in HydraConfig.get().overrides.task]
    added = {key.lstrip("+") for key in given if key.startswith("+") and not {".", "/", "@"} & set(key)}
    known = {_EXPERIMENT, *map(str, composed)} - added
    for key in sorted(added - known):
        if near := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            raise ValueError(f"+{key}=... adds a key that nothing reads. Did you mean {near[0]}=...?")


def _unknown_choice(group: str, name: str, known: Sequence[str]) -> str:
    """Return the message for a config file that does not exist; a mode with options is written with overrides."""
    if group != "pipeline":
        return unknown_name_message(group, name, known)
    mode = mode_printed_as(name)
    if mode is None:
        return unknown_mode_message(group, name, known)
    options = {option.name: getattr(mode, option.name) for option in fields(mode) if option.name != "name"}
    defaults = {option.name: option.default for option in fields(mode)}
    given = [f"pipeline.{key}={str(value).lower()}" for key, value in options.items() if value != defaults[key]]
    return f"pipeline={name} is {mode.name} with options. Write: pipeline={mode.name} {' '.join(given)}"


def add_or_override(argument: str) -> str:
    """Let `data.batch_size=8` set an option that no config file names; most defaults are only in Python."""
    return f"++{argument}" if _OPTION.match(argument) else argument


def run_job(job: Callable[[dict[str, Any], Path], float | None], composed: DictConfig) -> float | None:
    """Check the config and call `job(config, run folder)`; errors that a user can fix end the process with one line."""
    try:
        _refuse_added_typos(composed)
        config = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
        config_checks.check(config)
        return job(config, Path(HydraConfig.get().runtime.output_dir))
    except OmegaConfBaseException as err:
        _fail(f"{str(err).splitlines()[0]}. Set it on the command line: {err.full_key}=...")
    except launch.RunEndedError as err:
        _fail(str(err), err.exit_code)
    except Exception as err:
        if launch.under_launcher() and is_printed_last(err):  # all ranks report the first cause, after all else
            sys.excepthook(type(err), err, err.__traceback__)
            raise SystemExit(1) from None
        if _WANTS_TRACEBACK or not isinstance(err, ValueError | TypeError | OSError | ImportError):
            raise
        _fail(f"{type(err).__name__}: {err}")


def run_on_ranks(config: dict[str, Any], folder: Path, worker: str, about: str) -> None:
    """Call `run(config, folder)` of a worker, a file in `apps`, on every rank; without a launcher, start the ranks."""
    build.check(config)
    config = build.complete(config)
    if launch.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")  # resolved; the ranks run from this file
    if launch.under_launcher():
        import_module(f".{worker}", __package__).run(config, folder)
        return
    num_ranks = build.num_ranks(config)
    model, data = (config[group]["_target_"].rpartition(".")[2] for group in ("model", "data"))
    print(f"overlap-{worker.removesuffix('_worker')}: {model} on {data}, {num_ranks} ranks, {about}", flush=True)
    launch.run_ranks(num_ranks, worker, folder)


def _fail(message: str, exit_code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(exit_code)
