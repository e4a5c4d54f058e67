"""Checkpoints of sharded tables as a folder: every rank writes its shards with torch.distributed.checkpoint."""

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from ..compat.torch import tree_map_only
from ..distributed import Group, gather_objects, gather_on_rank_zero, together
from ..row_log import arrow
from ..storage import (
    MARKER,
    About,
    DamagedError,
    Manifest,
    Place,
    SavedFile,
    can_hold_folders,
    checksum_of,
    damaged_part,
    hidden_os_error,
    is_unfinished,
    new_save,
    or_warn,
    place_at,
    read_seal,
)
from ..tables import ShardedStateNames
from ..text import check_known, some, without_secrets
from .dense_state import empty_table_states, put_table_states, take_table_states
from .incremental import (
    ROWS_NAME,
    Increment,
    Increments,
    RowsFile,
    is_incremental,
    put_changed_rows,
)
from .managed_collision_state import Generators, collision_state, pieces_for
from .model_state import (
    OTHER_TABLES,
    Listed,
    ModelLoading,
    may_have_rows,
    put_at,
    restore_objects,
    take_tensors,
    with_lists,
)
from .moved_ids import move_ids, segment_names
from .not_checkpoints import INCREMENT_NAME, METADATA_NAME, damaged, why_no_checkpoint
from .parts import (
    AVERAGES,
    COLLISIONS,
    ENTRIES,
    FUSED,
    FUSED_CLASSES,
    MODEL,
    SHARDED_NAMES,
    TABLE_OPTIMIZERS,
    rename_former_entries,
)
from .safe_metadata import SafePlanner, SafeReader
from .snapshot import Snapshot, saved
from .stored_files import SavedFiles
from .table_state import FusedTables, Loading, Piece, check_sizes, on_host

SHARDED, FULL, INCREMENTAL = FORMATS = "sharded", "full", "incremental"
"""A folder written by all ranks; one file, gathered on rank 0; folders of which most have changed rows only."""

State: TypeAlias = dict[str, dict[str, Any]]  # part -> name -> piece of state
_SAVE = "lightning_overlap_save"  # entry of `meta.pt`: the identity of the save, which its checksums have too
_BASE = "lightning_overlap_base"  # entry of `increment.pt`: the identity of the save of its base


def check_format(checkpoint_format: str | None, async_checkpoint: bool, most_increments: float) -> None:
    """Raise a ValueError if the format is unknown, is "full" with `async_checkpoint`, or for a negative number."""
    if isinstance(most_increments, bool) or not isinstance(most_increments, int | float):
        raise TypeError(f"most_increments is a part of a whole checkpoint's bytes, got {most_increments!r}.")
    if not most_increments >= 0:
        raise ValueError(f"most_increments must be 0 or more, got {most_increments}.")
    if checkpoint_format is not None:
        check_known("checkpoint_format", checkpoint_format, FORMATS)
    if checkpoint_format == INCREMENTAL:
        arrow()  # an ImportError without pyarrow
    if checkpoint_format == FULL and async_checkpoint:
        raise ValueError(
            "async_checkpoint=True needs checkpoint_format='sharded', got 'full': training waits while a full "
            "file is gathered."
        )


def check_folder_path(path: Any, storage_options: Any, world_size: int = 1) -> Place:
    """Return the place of a checkpoint; raise a ValueError if it cannot be a folder.

    An ImportError if the address needs a package that is not installed.
    """
    shown = without_secrets(str(path))
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ValueError(
            f"storage_options are options of fsspec's file system, by name, got a {type(storage_options).__name__}."
        )
    place = place_at(path, storage_options)
    if place.is_on_disk and storage_options is not None:
        raise ValueError(f"{shown} is local, and storage_options are for an object store. Leave them out.")
    if world_size > 1 and str(path).startswith("memory://"):
        raise ValueError(
            f"a sharded checkpoint of {world_size} ranks cannot be at {shown}: each rank has a memory of its own. "
            "Save to an object store, or to a folder that all ranks share."
        )
    return place


def take_state(
    checkpoint: dict[str, Any],
    model: nn.Module,
    group: Group,
    fused: FusedTables | None = None,
    generators: Generators | None = None,
) -> State:
    """Move tensors of the module out of Lightning's checkpoint, in place, and add the fused optimizers' state."""
    state: State = {MODEL: take_tensors(checkpoint, model)}
    if "optimizer_states" in checkpoint:
        fused = fused or FusedTables(model)
        checkpoint[FUSED_CLASSES] = fused.classes
        state[FUSED] = {str(key): piece for key, piece in fused.state().items()}
        state[TABLE_OPTIMIZERS] = take_table_states(checkpoint["optimizer_states"], model)
        state[COLLISIONS] = collision_state(model, group, generators)
    state[AVERAGES] = checkpoint.pop(AVERAGES, {})
    if not is_rank_zero(group):
        # Any rank may write what several have. Buffers that are not sharded, as of BatchNorm, differ by rank.
        alike, sharded = dict(model.named_parameters()), ShardedStateNames(model)
        for part in (MODEL, AVERAGES):
            state[part] = {name: piece for name, piece in state[part].items() if name in alike or name in sharded}
    # An empty part would be an object of the folder, and ranks differ in their parts.
    return {part: values for part, values in state.items() if values}


class FolderSaver:
    """Writes checkpoint folders one at a time, optionally in a thread; `group` is only for saves."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # Kept: whoever starts a thread waits until it runs, and it may then hold the interpreter for a while.
        self._executor: ThreadPoolExecutor | None = None
        self._under_way: list[Future[bool | None]] = []  # a save, and then the actions of `on_commit`
        self._swept: set[str] = set()  # the folders of checkpoints from which leftovers were removed

    def save(
        self,
        checkpoint: dict[str, Any],
        place: Place,
        model: nn.Module,
        *,
        asynchronous: bool,
        about: About,
        increments: Increments | None = None,
        follows: bool = False,
        generators: Generators | None = None,
    ) -> None:
        """Write Lightning's checkpoint and the model's shards into a folder; every rank calls this.

        Moves sharded state out of `checkpoint`. With `increments` and `follows`, which only `can_follow` of all ranks
        allows, rows that did not change are not written. Raises as `wait` does, also for an earlier save.
        """
        self.wait()
        fused = increments.fused if increments and follows else None
        state = take_state(checkpoint, model, self._group, fused, generators)
        increment = increments.take(state) if increments and follows else None
        name, snapshot, rest = new_save(), Snapshot(), None
        if is_rank_zero(self._group):
            whole = {**checkpoint, _SAVE: name}
            content = whole if increment is None else {**whole, _BASE: increment.base_save}
            rest = snapshot.saver_of(content) if asynchronous else partial(saved, content)
        if increments is not None and increment is None:
            increments.begin_whole(model)
        if asynchronous:
            copy = on_host if increment is None else snapshot.of_piece  # without all tables in page-locked memory
            state = tree_map_only(Tensor, copy, state)
            snapshot.begun()
        # From here on there are threads, which take the interpreter from this one.
        if increments is not None and increment is not None:
            increments.start(increment)
        sweeps = place.store.address not in self._swept
        self._swept.add(place.store.address)
        write_as = partial(_write, place, about, self._group, name, sweeps=sweeps, snapshot=snapshot)
        write = partial(write_as, rest, increments, increment, state)
        if not asynchronous:
            if increments is not None:
                increments.settle()
            if not write() and increments is not None and increment is not None:
                # What it was to stand on is gone, and the tables still are what is to be saved.
                for part, key, piece in increment.pieces:
                    state.setdefault(part, {})[key] = piece
                increments.begin_whole(model)
                rest = None if rest is None else partial(saved, whole)
                write_as(rest, increments, None, state)
            return
        # Not torch.distributed.checkpoint.async_save: the marker is written after it.
        self._under_way = [self._submit(write)]

    def _submit(self, action: Callable[[], bool]) -> Future[bool | None]:
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self._executor.submit(action)

    def on_commit(self, action: Callable[[], None]) -> None:
        """Call a function after the current save succeeds; at once if there is none."""
        if self._executor is None or not self._under_way:
            action()
            return
        save = self._under_way[0]
        self._under_way.append(self._executor.submit(lambda: action() if _is_complete(save) else None))

    def wait(self) -> None:
        """Wait for the current save and for actions of `on_commit`; raise an OSError on every rank if it failed."""
        under_way, self._under_way = self._under_way, []
        futures.wait(under_way)
        for done in under_way:
            done.result()


def _is_complete(save: Future[bool | None]) -> bool:
    """Whether a save, which has ended, has made a checkpoint."""
    return save.exception() is None and save.result() is True


def is_rank_zero(group: Group) -> bool:
    """Return whether this is rank 0 of a group, or the only rank."""
    return group is None or group.rank() == 0


def on_rank_zero(action: Callable[[], None], group: Group) -> None:
    """Call a function on rank 0; all ranks call this, and raise a RuntimeError if it fails."""
    together(action if is_rank_zero(group) else lambda: None, group)


@contextmanager
def writing(path: Path | Place | str) -> Iterator[None]:
    """Raise an OSError for an error that every rank raises, also for a rank that does not respond."""
    try:
        yield
    except (CheckpointException, RuntimeError) as err:
        raise OSError(f"could not write the checkpoint {path}: {_in_words(err)}") from err


def _in_words(err: BaseException) -> str:
    if not isinstance(err, CheckpointException):
        return str(err)
    ranks = {f"{type(error).__name__}: {error}": rank for rank, (error, _) in err.failures.items()}
    return "; ".join(f"rank {rank}: {error}" for error, rank in ranks.items())


def _write(
    place: Place,
    about: About,
    group: Group,
    name: str,
    rest: Callable[[], memoryview] | None,
    increments: Increments | None,
    increment: Increment | None,
    state: State,
    *,
    sweeps: bool,
    snapshot: Snapshot,
) -> bool:
    """Write a checkpoint; return whether it is complete: it is not if files are gone on which an increment stands."""
    shares, folders = increments is not None, ("", "")
    is_gone = commits = False  # on rank 0

    def begin() -> None:
        nonlocal folders
        if sweeps:
            or_warn(place.sweep)
        folders = place.begin(name, shares=shares)

    def finish() -> None:
        nonlocal is_gone, commits
        files = {key: value for of_rank, _ in written for key, value in of_rank.items()}
        assert rest is not None
        last = {METADATA_NAME if increment is None else INCREMENT_NAME: rest()}
        base = None
        if increment is not None:
            for _, rows in written:
                increment.rows |= {key: RowsFile(files[key], places) for key, places in rows.items()}
            files |= {key: one.file for key, one in increment.rows.items()}
            last[ROWS_NAME] = memoryview(increment.index())
            base = increment.base_of(place)
        files |= {key: SavedFile(len(content), checksum_of(content), name) for key, content in last.items()}
        for key, content in last.items():
            place.store.put(f"{folders[0]}/{key}", [content])
        manifest = Manifest(place.store, place.name, name, files, base, about)
        if shares:
            place.store.remove_empty_folder(folders[1])  # if no row has changed
        commits = True
        gone = place.commit(manifest, folders[0])
        if increments is None:
            return
        if gone:
            is_gone, commits = True, False
            increments.lose(gone[0], f"{place} was not saved with it, and the next checkpoint is whole")
        else:
            increments.saved(manifest, place, increment)

    def wait() -> None:
        if increment is not None:
            # Until the next backward the training thread would often wait for the interpreter that this one has.
            increment.wait()
        snapshot.wait()

    with writing(place), ExitStack() as undo:
        if is_rank_zero(group):
            undo.callback(lambda: None if commits else or_warn(partial(place.drop, filter(None, folders))))
        together(wait, group)
        on_rank_zero(begin, group)
        [(name, folders), *_] = gather_objects((name, folders), group)  # rank 0's
        own = SavedFiles(place.store, folders[0], name)
        shared = SavedFiles(place.store, folders[1], f"../{folders[1]}")
        whole = shares and increment is None
        save(
            state,
            storage_writer=_writer_of(shared if whole else own),
            planner=_OneCopy(),
            process_group=group,
            no_dist=group is None,
        )
        rows = {} if increment is None else together(partial(increment.write, shared, _rank(group)), group)
        written = gather_on_rank_zero(({**own.written, **shared.written}, rows), group)
        on_rank_zero(finish, group)
        if increment is not None and gather_objects(is_gone, group)[0]:
            return False
    if increments is not None:
        increments.end_save()
    return True


def _writer_of(files: SavedFiles) -> "_Writer":
    # With one file per rank, the writer of torch 2.13 keeps host copies of all tensors until the file is complete.
    writer = _Writer(files.folder, single_file_per_rank=False, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = files  # type: ignore[assignment]
    writer.path = files.folder  # an address is no `Path`
    return writer


def _rank(group: Group) -> int:
    return 0 if group is None else group.rank()


class _Writer(FileSystemWriter):
    """Writes shards; ranks send each other the error of the disk."""

    @override
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with hidden_os_error():
            return super().write_data(*args, **kwargs)


class _OneCopy(DefaultSavePlanner):
    """Copies tensors to the host, and frees each early: torch's writer keeps a written tensor until it has the next."""

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


def resolve_path(place: Place) -> Place:
    """Return the place of a checkpoint; raise a ValueError if what is there is none, or is not whole."""
    if place.is_on_disk and is_unfinished(place.name):
        raise ValueError(f"{place} is the leftover of an unfinished save. Load another checkpoint.")
    if place.is_folder():
        return place
    if not place.is_on_disk:
        if place.holds_files():
            raise ValueError(
                f"{place} is no checkpoint: it has no {MARKER}, which a save writes last. It is the leftover of an "
                "unfinished save, a copy that lacks files, or a folder of checkpoints. Load another checkpoint."
            )
        raise FileNotFoundError(f"Checkpoint file not found: {place}")
    if not place.path.exists():
        left = f" (an unfinished save left {some(place.unfinished())})" if place.unfinished() else ""
        raise FileNotFoundError(f"Checkpoint file not found: {place}{left}")  # in Lightning's words
    if place.is_file() and read_seal(place.path) is not None:
        return place  # a full file of this strategy, whole or damaged
    if (why := why_no_checkpoint(place.path, place)) is not None:
        raise ValueError(why)
    return place


def folder_at(path: Any) -> Place | None:
    """Return the place of a checkpoint folder at an address of fsspec; None if it may be a file.

    Raises a ValueError if there is a folder that is no checkpoint.
    """
    if not can_hold_folders(path):
        return None
    place = place_at(path)
    try:
        if place.is_folder():
            return place
    except PermissionError:
        # A store says this of what is not there, to whoever may read files and not list them.
        if place.is_file():
            return None
        raise
    return resolve_path(place) if place.holds_files() else None


def discard_folder(path: Any, storage_options: Any) -> None:
    """Remove a checkpoint folder in an object store, whole or not, from beside a file of the same name.

    A warning if the store fails.
    """
    options = storage_options if isinstance(storage_options, Mapping) else None  # else a CheckpointIO of the user's

    def discard() -> None:
        place = place_at(path, options)
        with suppress(FileExistsError):  # somebody else's files stay, and no load takes them for a checkpoint
            place.discard_folder()

    if can_hold_folders(path):
        or_warn(discard)


def load_folder(
    place: Place,
    model: nn.Module,
    group: Group,
    *,
    weights_only: bool | None,
    strict: bool,
    with_optimizers: bool,
    moves_rates: bool = False,
    averages: Callable[[], Mapping[str, Piece]] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint folder into a sharded module, in place; return Lightning's checkpoint. All ranks call this.

    `with_optimizers` also loads the optimizer state of tables (`moves_rates`: as in `Loading`), and `averages` returns
    memory by name for averages of weights; the names of those that were loaded are in the checkpoint's `AVERAGES`.
    Raises a DamagedError if a file is not as it was saved, and a RuntimeError if the folder is of another model or
    another fused optimizer; tables may have been written in part by then.
    """

    def begin() -> tuple[Manifest, dict[str, Any], Listed, ModelLoading]:
        manifest = _manifest_of(place)
        rest = _read_rest(manifest, weights_only=weights_only, checks_all=is_rank_zero(group))
        listed = _saved(manifest, rest)
        of_model = ModelLoading(model, rest, listed)
        of_model.check(place, strict=strict)
        return manifest, rest, listed, of_model

    manifest, rest, listed, of_model = together(begin, group, alike=(ValueError,))  # what the files are
    saved, state = listed.pieces, cast(State, {MODEL: of_model.pieces()})
    # The saved ones are read beside the module's own, which say what this run's shards are.
    segments = {key: name for key, name in segment_names(model).items() if key in state[MODEL]}
    state[MODEL] |= {key: torch.empty_like(state[MODEL][key]) for key in segments}
    loading = None
    if with_optimizers and "optimizer_states" in rest:
        classes = rest.get(FUSED_CLASSES, {})
        loading = together(partial(Loading, model, saved[FUSED], classes, moves_rates=moves_rates), group)
        state[FUSED], state[TABLE_OPTIMIZERS] = loading.pieces, empty_table_states(saved[TABLE_OPTIMIZERS], model)
    if averages is not None and (there := saved.get(AVERAGES)):
        state[AVERAGES] = {key: piece for key, piece in averages().items() if key in there}
        check_sizes(state[AVERAGES], {key: size for key, (size, _) in there.items()})
    there = saved.get(COLLISIONS, {})
    state[COLLISIONS] = {key: torch.empty(there[key][0], dtype=there[key][1]) for key in pieces_for(there, group)}
    state = {part: values for part, values in state.items() if values}
    with _loading(place):
        for part, pieces in _by_part(manifest, state):
            reader, planner = SafeReader(part), SafePlanner(weights_only)
            load(pieces, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    if is_incremental(manifest):
        together(partial(put_changed_rows, manifest, state), group, alike=(DamagedError,))
    state.setdefault(MODEL, {})
    saved_segments = {name: state[MODEL][key] for key, name in segments.items()}
    for move in move_ids(model, saved_segments, group):
        move.apply(state[MODEL], of_optimizers=False)
        if loading is not None:
            move.apply(loading.pieces, of_optimizers=True)
    state[MODEL] = {key: piece for key, piece in state[MODEL].items() if key not in segments}
    if loading is not None:
        loading.finish()
        put_table_states(state.get(TABLE_OPTIMIZERS, {}), rest["optimizer_states"])
    # None: already loaded.
    loaded = {ENTRIES[FUSED]: None, AVERAGES: sorted(state.get(AVERAGES, {})), COLLISIONS: state.get(COLLISIONS, {})}
    return {**rest, "state_dict": of_model.state_dict(state[MODEL]), **loaded}


def read_folder(path: str | os.PathLike[str] | Place, *, weights_only: bool | None) -> dict[str, Any]:
    """Return what a full file of a checkpoint folder has, with unsharded tensors on the host; needs no other ranks.

    Holds these tensors and one shard. Raises a DamagedError if a file is not as it was saved, and a RuntimeError for
    objects that `weights_only` rejects.
    """
    place = path if isinstance(path, Place) else place_at(path)
    manifest = _manifest_of(place)
    rest = _read_rest(manifest, weights_only=weights_only, checks_all=True)
    state: State = {}
    with _loading(place):
        # What an incremental folder has itself comes before what its base has.
        for part in (manifest, manifest.base):
            if part is None:
                continue
            reader = SafeReader(part)
            metadata = reader.read_metadata()
            names, known = metadata.state_dict_metadata, metadata.planner_data
            paths = {name: known[name] if len(known.get(name, ())) > 1 else name.partition(".")[::2] for name in names}
            wanted = {name: keys for name, keys in paths.items() if part is manifest or _is_of_base(keys, state, rest)}
            flat: dict[str, Any] = {}
            for name in wanted:
                entry = names[name]
                flat[name] = None
                if isinstance(entry, TensorStorageMetadata):
                    flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            load(flat, storage_reader=reader, planner=SafePlanner(weights_only), no_dist=True)
            for name, keys in wanted.items():
                put_at(state, keys, flat.pop(name))
    if is_incremental(manifest):
        put_changed_rows(manifest, state)
    tensors = {key: with_lists(value) for key, value in state.pop(MODEL, {}).items()}
    rest.pop(SHARDED_NAMES, None)
    restore_objects(rest, tensors)
    return {**rest, **{ENTRIES[part]: pieces for part, pieces in state.items()}}


def _is_of_base(keys: Sequence[str | int], own: State, rest: Mapping[str, Any]) -> bool:
    """Whether an incremental folder takes what is under these keys from its base, and has not written it anew."""
    part, name = str(keys[0]), str(keys[1])
    return may_have_rows(part, name, rest) and name not in own.get(part, {})


@contextmanager
def _loading(path: Place) -> Iterator[None]:
    """Raise the errors of `torch.distributed.checkpoint`, which every rank raises, in this package's words."""
    try:
        yield
    except CheckpointException as err:
        errors = [error for error, _ in err.failures.values()]
        for error in errors:
            if isinstance(error, DamagedError):
                raise DamagedError(str(error)) from err
        for error in errors:
            if isinstance(error, pickle.UnpicklingError):
                raise _untrusted(path, error) from err
        raise RuntimeError(f"could not load {path} into this model: {_in_words(err)}. {OTHER_TABLES}") from err


def _manifest_of(place: Place) -> Manifest:
    """Return the manifest of a checkpoint; raise a DamagedError if there is none."""
    manifest = place.manifest()
    if manifest is None:
        raise DamagedError(damaged_part(place, MARKER, "is missing"))
    if is_incremental(manifest) and manifest.base is None:
        raise ValueError(
            f"{place} is an incremental checkpoint of an earlier version of lightning_overlap. Make a full file of it "
            "with that version: python -m lightning_overlap.consolidate FOLDER."
        )
    return manifest


def _read_rest(manifest: Manifest, *, weights_only: bool | None, checks_all: bool) -> dict[str, Any]:
    """Return what `meta.pt` has; with `checks_all` raise a DamagedError if any file is missing, short or long."""
    rest_name = INCREMENT_NAME if is_incremental(manifest) else METADATA_NAME
    with manifest.checked(rest_name) as file:
        parts = [manifest] if manifest.base is None else [manifest, manifest.base]
        for part in parts if checks_all else ():
            for name in part.files:
                part.check_size(name)
        rest = read_file(file, weights_only=weights_only, shown=f"{manifest.shown}/{rest_name}")
    if manifest.save != rest.pop(_SAVE, ""):
        raise DamagedError(damaged_part(manifest.shown, MARKER, f"is of another save than its {rest_name}"))
    base_save = rest.pop(_BASE, None)
    if (None if manifest.base is None else manifest.base.save) != base_save:
        raise DamagedError(damaged_part(manifest.shown, MARKER, "lists the base of another save"))
    rename_former_entries(rest)
    return rest


def _saved(manifest: Manifest, rest: Mapping[str, Any]) -> Listed:
    """Return what a checkpoint's tensors are; also those in its base that it has not written anew."""
    own = _listed(manifest)
    if manifest.base is not None:
        base = _listed(manifest.base)
        for part in (MODEL, FUSED):
            pieces = {name: entry for name, entry in base.pieces[part].items() if may_have_rows(part, name, rest)}
            own.pieces[part] = {**pieces, **own.pieces[part]}
        own.paths = {**base.paths, **own.paths}
    return own


def _by_part(manifest: Manifest, state: State) -> list[tuple[Manifest, State]]:
    """Return a checkpoint and its base, each with the pieces that are loaded from it."""
    if manifest.base is None:
        return [(manifest, state)]
    own = _listed(manifest).pieces
    of_base: State = {}
    of_own: State = {}
    for part, pieces in state.items():
        for name, piece in pieces.items():
            divided = of_own if name in own.get(part, {}) else of_base
            divided.setdefault(part, {})[name] = piece
    return [(manifest.base, of_base), (manifest, of_own)]


def _listed(manifest: Manifest) -> Listed:
    listed = Listed()
    listed.add(SafeReader(manifest).read_metadata())
    return listed


def read_file(path: Path, *, weights_only: bool | None, mmap: bool = False, shown: object = None) -> dict[str, Any]:
    """Read a file with `torch.load`, onto the host; messages say `shown` for a path that is a copy.

    Raises a RuntimeError for objects that `weights_only` rejects, a ValueError for a file that is no checkpoint.
    """
    shown = path if shown is None else shown
    if (why := why_no_checkpoint(path, shown)) is not None:
        raise ValueError(why)
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as err:
        if "truncated" in str(err):
            raise ValueError(damaged(shown, err)) from err
        raise _untrusted(shown, err) from err
    except (MemoryError, OSError, ImportError, AttributeError):  # the last two of a class that is not there
        raise
    except Exception as err:  # the bytes may be anything
        raise ValueError(damaged(shown, err)) from err
    if not isinstance(content, dict):
        raise ValueError(
            f"{shown} is no checkpoint: torch.save has written {type(content).__name__!r} to it. Pass a file that "
            "ModelCheckpoint or trainer.save_checkpoint wrote."
        )
    return content


def _untrusted(path: object, err: Exception) -> RuntimeError:
    return RuntimeError(
        f"{path} contains objects that load only if you trust the file: {str(err).splitlines()[0]} "
        "Allow their classes with torch.serialization.add_safe_globals([...]), or set "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment. (Lightning 2.6 does not pass weights_only of "
        "trainer.fit() and similar calls to a strategy that loads after sharding.)"
    )
