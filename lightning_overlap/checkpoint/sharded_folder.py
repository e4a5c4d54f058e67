"""Checkpoints of sharded tables as a folder: every rank writes its own shards, by torch.distributed.checkpoint.

Lightning's default would pickle rank 0's shards alone, without a word about the others. A folder loads on any number
of ranks and under any sharding plan (`table_state`). It gets its name only when it is complete (`atomic`): until then
it is called `NAME.unfinished`, and what had the name before stays. Shards are written one after the other, each into a
file. A shard on a device, or one that shares a kernel's memory with other tables, is copied for that, one at a time. An
asynchronous save holds a copy of this rank's shards on the host.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from ..distributed import gather_objects, together
from ..text import some, unknown_name_message
from .atomic import atomic_replace, being_replaced, remove, sibling
from .dense_state import empty_table_states, put_table_states, take_table_states
from .safe_metadata import SafePlanner, SafeReader
from .table_state import Loading, fused_state, on_host, plan_loading

METADATA_NAME = "meta.pt"
"""The file that marks a checkpoint folder and holds what is not sharded: loops, callbacks, dense optimizers."""

SHARDED, FULL = FORMATS = "sharded", "full"
"""A folder, to which every rank writes its shards; one file, gathered on rank 0."""

MODEL, FUSED, TABLE_OPTIMIZERS = "model", "fused_optimizer", "table_optimizers"
"""Parts of a folder: weights, state of fused optimizers, state of dense optimizers for shards of tables."""


def check_format(checkpoint_format: str | None, async_checkpoint: bool) -> None:
    """Check the strategy's arguments.

    Raises:
        ValueError: The format is unknown, or `async_checkpoint` is asked for with one file.
    """
    if checkpoint_format is not None and checkpoint_format not in FORMATS:
        raise ValueError(unknown_name_message("checkpoint_format", str(checkpoint_format), FORMATS))
    if checkpoint_format == FULL and async_checkpoint:
        raise ValueError(
            "async_checkpoint=True writes folders: a full file has to be gathered while nothing else runs. "
            "Use checkpoint_format='sharded'."
        )


def is_folder(path: Path) -> bool:
    """Whether a path is a folder that `FolderSaver` wrote."""
    return (path / METADATA_NAME).is_file()


def check_folder_path(path: Any, storage_options: Any) -> None:
    """Check that a checkpoint can be a folder.

    Raises:
        ValueError: The path is remote, or there are storage options.
    """
    if "://" in str(path) or storage_options is not None:
        raise ValueError(
            f"a checkpoint of sharded tables is a local folder, got {path!r}"
            f"{'' if storage_options is None else ' with storage_options'}. Save to a folder that all ranks share, "
            "or use checkpoint_format='full'."
        )


def take_state(checkpoint: dict[str, Any], model: nn.Module) -> dict[str, dict[str, Any]]:
    """Move what the ranks hold in parts out of Lightning's checkpoint, in place; add the fused optimizers' state.

    Returns:
        Pieces by name, by part: `MODEL`, and with optimizer states (not `save_weights_only=True`) `FUSED` and
        `TABLE_OPTIMIZERS`. Empty parts are left out.
    """
    state = {MODEL: checkpoint.pop("state_dict")}
    if "optimizer_states" in checkpoint:
        state[FUSED] = {str(key): piece for key, piece in fused_state(model).items()}
        state[TABLE_OPTIMIZERS] = take_table_states(checkpoint["optimizer_states"], model)
    # An empty part would be written as an object; ranks differ in what they have.
    return {part: values for part, values in state.items() if values}


class FolderSaver:
    """Writes checkpoint folders, in a thread if told so; one at a time.

    Args:
        group: A gloo group of all ranks, which nothing else uses while a save is under way; None on one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._executor: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []  # a save, and what `on_commit` was given since

    def save(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        model: nn.Module,
        *,
        asynchronous: bool = False,
        also: Path | None = None,
    ) -> None:
        """Write what Lightning gathered, and the model's shards, into a folder; every rank calls this.

        Args:
            checkpoint: Lightning's checkpoint; what the ranks hold in parts is moved out of it.
            path: Name of the folder, which it gets when it is complete.
            model: The sharded model.
            asynchronous: Whether to return as soon as this rank's part is copied to the host, and write in a thread.
            also: A second name that the complete folder gets before.

        Raises:
            OSError: A rank could not write, in this save or in the asynchronous one before; raised on every rank.
        """
        self.wait()
        state = take_state(checkpoint, model)
        buffer = io.BytesIO()
        if is_rank_zero(self._group):
            torch.save(checkpoint, buffer)
        if not asynchronous:
            _write(state, buffer.getbuffer(), path, self._group, also)
            return
        # After torch.distributed.checkpoint.async_save somebody would have to wait to give the folder its name.
        state = {
            part: {key: on_host(value) if isinstance(value, Tensor) else value for key, value in values.items()}
            for part, values in state.items()
        }
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way = [self._executor.submit(_write, state, buffer.getbuffer(), path, self._group, also)]

    def on_commit(self, action: Callable[[], None]) -> None:
        """Call a function as soon as the save under way has succeeded; at once if none is under way."""
        if self._executor is None:
            action()
            return
        save = self._under_way[0]

        def if_succeeded() -> None:
            if save.exception() is None:
                action()

        self._under_way.append(self._executor.submit(if_succeeded))

    def wait(self) -> None:
        """Wait for the save under way and for what `on_commit` was given.

        Raises:
            OSError: The save has failed; raised on every rank.
        """
        under_way, self._under_way = self._under_way, []
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        for done in under_way:
            done.result()


def is_rank_zero(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank of a group, or the only one."""
    return group is None or group.rank() == 0


def _write(
    state: dict[str, Any], rest: memoryview, path: Path, group: dist.ProcessGroup | None, also: Path | None
) -> None:
    """Write a folder next to `path`, then give it the name `also`, if there is one, and the name `path`."""
    unfinished = sibling(path, "unfinished")

    def begin() -> None:
        remove(unfinished)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        with (unfinished / METADATA_NAME).open("wb") as file:
            file.write(rest)
            file.flush()
            os.fsync(file.fileno())
        atomic_replace(unfinished, path, also)

    try:
        on_rank_zero(begin, path, group)
        # With one file a rank, the writer of torch 2.13 keeps host copies of all tensors until the file is whole.
        writer = FileSystemWriter(unfinished, single_file_per_rank=False, per_thread_copy_ahead=0)
        save(state, storage_writer=writer, planner=_OneCopy(), process_group=group, no_dist=group is None)
        on_rank_zero(finish, path, group)
    except (CheckpointException, RuntimeError) as err:  # raised on every rank, or another rank does not answer
        raise OSError(f"could not write the checkpoint {path}: {_said(err)}") from err


def _said(err: BaseException) -> str:
    """Return what has failed, in words; if several ranks report it, each failure once, with one of its ranks."""
    if not isinstance(err, CheckpointException):
        return str(err)
    ranks = {f"{type(error).__name__}: {error}": rank for rank, (error, _) in err.failures.items()}
    return "; ".join(f"rank {rank}: {error}" for error, rank in ranks.items())


class _OneCopy(DefaultSavePlanner):
    """Gives the writer each tensor to write, copied to the host where the writer would copy it.

    The writer (of torch 2.13, one thread and nothing copied ahead) has written a tensor when it asks for the next one,
    but holds on to it until it has that one. So the memory of the copy before is given back here.
    """

    _copy: Tensor | None = None

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)
            self._copy = None
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            shares_memory = data.untyped_storage().nbytes() != data.numel() * data.element_size()
            if shares_memory or data.device.type != "cpu":
                data = self._copy = torch.empty(data.shape, dtype=data.dtype).copy_(data.detach())
        return data


def on_rank_zero(action: Callable[[], None], path: Path, group: dist.ProcessGroup | None) -> None:
    """Call a function on rank 0. All ranks call this.

    Raises:
        OSError: It has failed, or rank 0 does not answer; raised on all ranks.
    """
    try:
        together(action if is_rank_zero(group) else lambda: None, partial(gather_objects, group=group))
    except RuntimeError as err:
        raise OSError(f"could not write the checkpoint {path}: {err}") from err


# -- loading ----------------------------------------------------------------------------------------------------


def resolve_path(path: Path) -> Path:
    """Return where a checkpoint is, given its name.

    Raises:
        FileNotFoundError: Nothing has this name.
        ValueError: It is no complete checkpoint.
    """
    if not path.exists() and (is_folder(before := being_replaced(path)) or before.is_file()):
        warnings.warn(f"{path} was being replaced; loading the previous checkpoint {before}.", stacklevel=2)
        return before
    if not path.exists():  # another process has not given it its name since
        left = " (a save that did not finish left NAME.unfinished)" if sibling(path, "unfinished").exists() else ""
        raise FileNotFoundError(f"Checkpoint file not found: {path}{left}")  # in Lightning's words
    if path.suffix == ".unfinished":
        raise ValueError(
            f"{path} is left over from an unfinished save. Load {path.with_suffix('')} if it exists, "
            "or another checkpoint."
        )
    if path.is_dir() and not is_folder(path):
        raise ValueError(
            f"{path} is a folder without {METADATA_NAME} and thus not a checkpoint of this strategy. "
            "Give the folder (or file) that ModelCheckpoint or trainer.save_checkpoint wrote."
        )
    return path


def load_folder(
    path: Path,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    *,
    weights_only: bool | None,
    strict: bool,
    with_optimizers: bool,
) -> dict[str, Any]:
    """Read a checkpoint folder into a sharded module, in place; all ranks call this.

    Args:
        path: The folder, saved on any number of ranks under any plan.
        model: The module, sharded in any way.
        group: A gloo group of all ranks; None on one rank.
        weights_only: As for `torch.load`, for objects that are no tensors.
        strict: Whether the folder has to hold exactly the module's weights.
        with_optimizers: Whether to read the state of fused optimizers, and of dense ones for shards of tables.

    Returns:
        The checkpoint as Lightning knows it. Its `state_dict` is the module's own, and `FUSED` is None, as that state
        is in the kernels already.

    Raises:
        RuntimeError: The folder is of another model or another fused optimizer, or its content is damaged.
    """
    saved = _saved(path)
    state_dict = model.state_dict()  # its tensors are the module's own memory: filling them loads the module
    weights = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
    rest = read_file(path / METADATA_NAME, weights_only=weights_only)
    objects = state_dict.keys() - weights.keys()  # of get_extra_state; a dict of them is saved entry by entry
    there = {name: next((key for key in objects if name.startswith(f"{key}.")), name) for name in saved[MODEL]}
    saved[MODEL] = {there[name]: value for name, value in saved[MODEL].items()}
    _check_same_model(path, state_dict.keys(), weights, saved[MODEL], strict)
    state: dict[str, Any] = {MODEL: {key: value for key, value in state_dict.items() if key in saved[MODEL]}}
    loading = Loading({}, lambda: None)
    if with_optimizers and "optimizer_states" in rest:
        loading = together(lambda: plan_loading(model, saved[FUSED]), partial(gather_objects, group=group))
        tables = empty_table_states(saved[TABLE_OPTIMIZERS], model)
        state |= {FUSED: loading.pieces, TABLE_OPTIMIZERS: tables}
    state = {part: values for part, values in state.items() if values}
    _load(state, path, weights_only, group)
    loading.finish()
    put_table_states(state.get(TABLE_OPTIMIZERS, {}), rest.get("optimizer_states", []))
    return {**rest, "state_dict": {**state_dict, **state.get(MODEL, {})}, FUSED: None}


def _load(state: dict[str, Any], path: Path, weights_only: bool | None, group: dist.ProcessGroup | None) -> None:
    planner = SafePlanner(weights_only)
    try:
        load(state, storage_reader=SafeReader(path), planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as err:  # on every rank
        untrusted = [error for error, _ in err.failures.values() if isinstance(error, pickle.UnpicklingError)]
        if untrusted:
            raise _untrusted(path, untrusted[0]) from err
        raise RuntimeError(
            f"could not load {path} into this model: {_said(err)}. Was it saved from other tables?"
        ) from err


def _saved(path: Path) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """Return shape and dtype of every tensor in a folder, by part and name."""
    found: dict[str, dict[str, Any]] = {MODEL: {}, FUSED: {}, TABLE_OPTIMIZERS: {}}
    for name, metadata in SafeReader(path).read_metadata().state_dict_metadata.items():
        part, _, key = name.partition(".")
        if part not in found:
            continue
        if isinstance(metadata, TensorStorageMetadata):
            found[part][key] = metadata.size, metadata.properties.dtype
        elif part == MODEL:
            found[part][key] = None  # an object of the module's get_extra_state
    return found


def read_file(path: Path, *, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    """Return what `torch.load` reads, on the host.

    Args:
        path: The file.
        weights_only: As for `torch.load`.
        mmap: Whether tensors stay in the file until they are used.

    Raises:
        RuntimeError: It has objects that `weights_only` refuses; the message says how to load it.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as err:
        raise _untrusted(path, err) from err
    return content


def _untrusted(path: Path, err: Exception) -> RuntimeError:
    return RuntimeError(
        f"{path} holds objects that load only if you trust the file: {str(err).splitlines()[0]} "
        "Lightning 2.6 does not pass weights_only of trainer.fit() and similar calls to a strategy that loads after "
        "sharding: allow the classes with torch.serialization.add_safe_globals([...]), or set "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
    )


def _check_same_model(
    path: Path, names: Set[str], weights: Iterable[str], saved: Mapping[str, Any], strict: bool
) -> None:
    missing, unexpected = some(sorted(names - saved.keys())), some(sorted(saved.keys() - names))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"could not load {path} into this model. Was it saved from other tables?"
            f"{f' Missing there: {missing}.' if missing else ''}"
            f"{f' Not in this model: {unexpected}.' if unexpected else ''}"
        )
    objects = some(sorted(key for key in weights if key in saved and saved[key] is None))
    if objects:
        raise RuntimeError(f"could not load {path} into this model: its {objects} are objects, not tensors.")
