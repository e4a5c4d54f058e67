"""Files whose checksum is right and whose bytes are not. Functions that ranks run: a wrong one may end the process."""

import dataclasses
import resource
from pathlib import Path
from zlib import crc32

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.deltas import EVICTED_ID, NO_ID, RAW_ID, SCHEMA, Dense, Header, RawIds, Rows, encode
from lightning_overlap.deltas.files import TRAILER_SIZE, FileError, decode

MOST_BYTES = 1 << 30  # of address space; allocators reserve some hundred MiB at once

HEADER = Header(
    run="run",
    generation=1,
    step=2,
    after=None,
    rank=0,
    world_size=1,
    chunk=0,
    num_chunks=1,
    num_pending=0,
    global_step=2,
    time=1.0,
    tables={"a": (10, 4), "b": (6, 2)},
)

OF_RAW_IDS = RawIds(
    module="mc.a", sorted_ids="mc.ids", rows_of_ids="mc.rows", segments=(0, 4, 10), hash_size=50, is_hashed=False
)
MANAGED = dataclasses.replace(HEADER, raw_ids={"a": OF_RAW_IDS}, schema=SCHEMA)


def raw_ids(field: str, ids: dict[int, int]) -> Rows:
    """Return an entry of the table "a", from row -> id."""
    return Rows("a", field, (10, 1), 0, torch.tensor(list(ids)), torch.tensor(list(ids.values())).unsqueeze(1))


def file_of_two_tables() -> bytes:
    rows = [
        Rows("a", "weight", (10, 4), 0, torch.arange(10), torch.ones(10, 4)),
        Rows("b", "weight", (6, 2), 0, torch.arange(6), torch.ones(6, 2)),
        Rows("a", "momentum1", (10, 1), 0, torch.arange(10), torch.ones(10, 1)),
        raw_ids(RAW_ID, {row: 100 + row if row in (0, 5) else NO_ID for row in range(10)}),
        raw_ids(EVICTED_ID, {3: 17}),
    ]
    return encode(MANAGED, rows, [Dense("top", torch.ones(3, 4))])


def with_checksum(content: bytes | bytearray) -> bytes:
    return bytes(content) + b"CRC32:%08x" % crc32(content)


def _refusal(data: bytes) -> FileError | None:
    try:
        decode(data, "NAME")
    except FileError as err:
        return err
    return None


def decode_changed(max_examples: int) -> tuple[int, int]:
    """Change up to four bytes and decode, often; return how often that was refused, and how often not."""
    content = file_of_two_tables()[:-TRAILER_SIZE]
    counts = [0, 0]
    decode(with_checksum(content))

    @settings(max_examples=max_examples, deadline=None, database=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, len(content) - 1), st.sampled_from([0, 1, 255]) | st.integers(0, 255)),
            min_size=1,
            max_size=4,
        )
    )
    def change(places: list[tuple[int, int]]) -> None:
        changed = bytearray(content)
        for at, byte in places:
            changed[at] = byte
        refusal = _refusal(with_checksum(changed))
        assert refusal is None or str(refusal).startswith("NAME ")
        assert refusal is None or not isinstance(refusal.__cause__, MemoryError)
        counts[refusal is None] += 1

    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, before[1]))
    try:
        change()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return counts[0], counts[1]
