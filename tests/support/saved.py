"""What a checkpoint folder lists, and where it lies."""

from pathlib import Path

from lightning_overlap.checkpoint.incremental import is_incremental
from lightning_overlap.storage import Manifest, place_at


def manifest_of(path: Path | str) -> Manifest:
    """Return the manifest of a checkpoint folder, which has to be whole."""
    manifest = place_at(path).manifest()
    assert manifest is not None, f"{path} has no marker"
    return manifest


def is_increment(path: Path | str) -> bool:
    """Return whether a checkpoint is a folder that has the changed rows only."""
    manifest = place_at(path).manifest()
    return manifest is not None and is_incremental(manifest)


def saves_of_rows(path: Path | str) -> set[str]:
    """Return the numbers of the saves whose rows an incremental checkpoint has; none of a whole one."""
    return {name.split("_")[1] for name in manifest_of(path).files if name.startswith("rows_")}


def files_of(path: Path | str) -> dict[str, Path]:
    """Return the files on a disk that a checkpoint folder lists itself, by name; not those of its base."""
    manifest = manifest_of(path)
    return {name: Path(manifest.store.address) / manifest.path(name) for name in manifest.files}


def files_of_base(path: Path | str) -> dict[str, Path]:
    """Return those of its base."""
    base = manifest_of(path).base
    assert base is not None, f"{path} has no base"
    return {name: Path(base.store.address) / base.path(name) for name in base.files}
