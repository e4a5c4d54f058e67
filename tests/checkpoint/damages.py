"""Damage checkpoints, mix files of two of them, and load. Functions that ranks run."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_overlap.checkpoint.safe_metadata import SafeReader
from lightning_overlap.storage import MARKER, Manifest, SavedFile, checksum_of, sealed_file

from ..support.cases import ROWWISE_ADAGRAD, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.saved import files_of, files_of_base, is_increment, manifest_of
from .checkpoints import parts_of, zeroed

SAVED_AT = 2, 4  # steps

Load = Callable[[Path], Any]


def remake_manifest(path: Path) -> None:
    """Give a changed folder a right manifest, as anybody can who changes it on purpose."""
    old = manifest_of(path)
    contents = {file.name: file.read_bytes() for file in (path / old.save).iterdir()}
    files = {name: SavedFile(len(content), checksum_of(content), old.save) for name, content in contents.items()}
    (path / MARKER).write_bytes(Manifest(old.store, old.name, old.save, files).encode())


class _AtTheEnd(Callback):
    """Saves twice, and then lets a function load."""

    def __init__(self, folder: Path, check: Callable[[Load], None]) -> None:
        self.folder, self.check = folder, check

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step in SAVED_AT:
            trainer.save_checkpoint(self.folder / str(trainer.global_step))

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        def load(path: Path) -> Any:
            zeroed(module)
            loaded: Any = trainer.strategy.load_checkpoint(path)
            trainer.strategy.load_model_state_dict(loaded)
            trainer.strategy.load_optimizer_state_dict(loaded)
            rest = {
                key: value for key, value in loaded.items() if not key.startswith(("state_dict", "fused_", "table_"))
            }
            return rest, parts_of(module), [parameter.detach().clone() for parameter in module.bottom.parameters()]

        self.check(load)


def save_and_check(folder: Path, checkpoint_format: str, check: Callable[[Load], None], **kwargs: Any) -> None:
    model = Model(ROWWISE_ADAGRAD)
    strategy = make_strategy(model, checkpoint_format=checkpoint_format, most_increments=10)
    small_pieces = mock.patch.multiple(sealed_file, _SMALLEST_PIECE=1 << 10, _OF_ONE_SIZE=3)
    with small_pieces:
        trainer = make_trainer(strategy, callbacks=[_AtTheEnd(folder, check)], **kwargs)
        trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, SAVED_AT[1]))


def refused(load: Load, path: Path) -> str:
    """Return the message if the checkpoint is refused as a damaged one; "" if it is loaded."""
    said = message(load, path)
    assert not said or said.startswith(("DamagedError: ", "ValueError: "))
    assert not said or (str(path) in said and "damaged" in said)
    assert "trust" not in said
    return said


def message(load: Load, path: Path) -> str:
    try:
        load(path)
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return ""


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def flip(path: Path, at: int) -> None:
    """Change a byte of a file; what other names it has, as those of hard links, keep the old content."""
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.unlink()
    path.write_bytes(content)


@contextmanager
def changed(path: Path, change: Callable[[bytearray], None]) -> Iterator[None]:
    content = path.read_bytes()
    after = bytearray(content)
    change(after)
    path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(content)


def flip_bits(folder: str, checkpoint_format: str, max_examples: int) -> list[int]:
    """Flip a bit of a checkpoint and load it, often; return how often it was refused, and loaded as it was saved."""
    counts = [0, 0]

    def check(load: Load) -> None:
        path = Path(folder) / str(SAVED_AT[1])
        files = [path / MARKER, *files_of(path).values()] if path.is_dir() else [path]
        if is_increment(path):  # what it has written anew is not read in its base
            manifest = manifest_of(path)
            assert manifest.base is not None
            own, base = (SafeReader(one).read_metadata() for one in (manifest, manifest.base))
            places = base.storage_data.items()
            unread = {place.relative_path for index, place in places if index.fqn in own.state_dict_metadata}
            files += [file for name, file in files_of_base(path).items() if name not in unread]
        files.sort()
        expected = load(path)
        from_an_end = st.tuples(st.sampled_from(files), st.integers(-300, 299))
        anywhere = st.sampled_from(files).flatmap(
            lambda file: st.tuples(st.just(file), st.integers(0, file.stat().st_size - 1))
        )

        @settings(max_examples=max_examples, deadline=None, database=None)
        @given(from_an_end | anywhere, st.integers(0, 7))
        def flip(place: tuple[Path, int], bit: int) -> None:
            file, at = place

            def change(content: bytearray) -> None:
                content[at % len(content)] ^= 1 << bit

            with changed(file, change):
                if said := refused(load, path):
                    assert file.name in said
                    counts[0] += 1
                else:
                    assert same(load(path), expected)
                    counts[1] += 1

        flip()

    save_and_check(Path(folder), checkpoint_format, check)
    return counts


def mix(folder: str, max_examples: int) -> int:
    """Put files of one save among those of another one of the same run, often; return how often it was refused."""
    num_refused = 0

    def check(load: Load) -> None:
        first, second = (Path(folder) / str(step) for step in SAVED_AT)
        # In folders of the same name, as markers do not say more of a file than its folder.
        of_first, of_second = ({MARKER: one / MARKER, **files_of(one)} for one in (first, second))
        names = sorted(of_first)
        assert names == sorted(of_second)
        expected = load(first), load(second)
        alike = {name for name in names if of_first[name].read_bytes() == of_second[name].read_bytes()}
        mixture = Path(folder) / "mixture"

        @settings(max_examples=max_examples, deadline=None, database=None)
        @given(st.sampled_from(names).map(lambda name: {name}) | st.sets(st.sampled_from(names)))
        def swap(others: Collection[str]) -> None:
            nonlocal num_refused
            shutil.rmtree(mixture, ignore_errors=True)
            for save in {of_first["meta.pt"].parent.name, of_second["meta.pt"].parent.name}:
                (mixture / save).mkdir(parents=True)
                for name in names:
                    source = (of_second if name in others else of_first)[name]
                    shutil.copy(source, mixture / name if name == MARKER else mixture / save / name)
            changes = set(others) - alike
            is_whole = not changes or changes == set(names) - alike
            said = refused(load, mixture)
            assert bool(said) != is_whole
            if is_whole:
                assert same(load(mixture), expected[bool(changes)])
            else:
                assert any(name in said for name in names)
                num_refused += 1

        swap()

    save_and_check(Path(folder), "sharded", check)
    return num_refused


def lose_each(folder: str, checkpoint_format: str, how: str) -> dict[str, str]:
    """Lose a file, or a part of it; load. Return name of the file -> messages."""
    said: dict[str, str] = {}
    lose = {
        "missing": lambda file: file.unlink(),
        "empty": lambda file: os.truncate(file, 0),
        "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    }[how]

    def check(load: Load) -> None:
        path = Path(folder) / str(SAVED_AT[1])
        files = {MARKER: path / MARKER, **files_of(path)}
        of_base = files_of_base(path) if is_increment(path) else {}
        files |= {f"{name} of the base": file for name, file in of_base.items()}
        for name, file in sorted(files.items()):
            kept = file.read_bytes()
            dist.barrier()
            _on_rank_zero(partial(lose, file))
            said[name] = message(load, path)
            dist.barrier()
            _on_rank_zero(partial(file.write_bytes, kept))

    save_and_check(Path(folder), checkpoint_format, check)
    return said


def _on_rank_zero(action: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def damage_full_file(folder: str, at: int) -> str:
    """Change a byte of a full file that all ranks load."""
    said = ""

    def check(load: Load) -> None:
        nonlocal said
        path = Path(folder) / str(SAVED_AT[1])
        load(path)
        _on_rank_zero(lambda: flip(path, at))
        said = message(load, path)

    save_and_check(Path(folder), "full", check)
    return said
