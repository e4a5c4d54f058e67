"""`python -m lightning_overlap.consolidate FOLDER [OUT]`: make a full file of a checkpoint folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .checkpoint import find_folder, read_folder, write_file
from .plugin import first_words
from .storage import is_address, place_at


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 with a message on stderr."""
    parser = argparse.ArgumentParser(
        "python -m lightning_overlap.consolidate",
        description="Make a full file of a checkpoint folder, which LightningModule.load_from_checkpoint and any "
        "strategy can load. Compares all checksums, and writes the file with its own.",
    )
    parser.add_argument("folder", help="a checkpoint of OverlapEmbeddingStrategy, on a disk or in an object store")
    parser.add_argument("out", type=Path, nargs="?", help="the file, which may not exist; default: FOLDER.consolidated")
    options = parser.parse_args(arguments)
    folder: str = options.folder
    first_words.calm_libraries()
    try:
        if options.out is None and is_address(folder):
            raise ValueError(f"a folder in an object store needs the name of a local file: {parser.prog} FOLDER OUT")
        out: Path = options.out or Path(f"{Path(folder)}.consolidated")
        if out.exists():
            raise FileExistsError(f"{out} exists. Remove it, or name another file: {parser.prog} FOLDER OUT")
        write_file(read_folder(find_folder(folder), weights_only=None), place_at(out), None)
    except (ValueError, OSError, ImportError, RuntimeError) as err:
        print(f"consolidate: {err}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
