"""Print the table of modes in docs/modes.md.

Run `python docs/modes_table.py` after a change of the modes and paste it; `tests/apps/test_readme.py` compares the two.
"""

from __future__ import annotations

from lightning_overlap.schedules import MODES, Schedule, Stage


def modes_table() -> str:
    """Return the modes as a Markdown table, every cell read off the schedules."""
    head = ("`pipeline=`", "what starts early", "batches in flight", "staleness", "held beyond `base` (batches)")
    rows = [
        (f"`{name}`", _starts_early(mode), str(mode.depth), str(mode.staleness), _held(mode))
        for name, mode in MODES.items()
    ]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _starts_early(mode: Schedule) -> str:
    parts = []
    for stage, what in (
        (Stage.COPY_BATCH_TO_DEVICE, "copy"),
        (Stage.INPUT_SPLITS_DIST, "sizes"),
        (Stage.INPUT_DATA_DIST, "ids"),
        (Stage.PREFETCH, "prefetch"),
        (Stage.EMBEDDING_LOOKUP, "lookup"),
    ):
        row = mode.step_of(stage)
        if row is not None and row.offset > 0:
            parts.append(f"{what} of N+{row.offset}")
    lookup = mode.step_of(Stage.EMBEDDING_LOOKUP)
    if lookup is not None and lookup.offset > 0:
        position = mode.position(Stage.EMBEDDING_LOOKUP)
        before = [stage for stage in (Stage.BACKWARD, Stage.OPTIMIZER_STEP) if position < mode.position(stage)]
        parts[-1] += {
            (Stage.BACKWARD, Stage.OPTIMIZER_STEP): " before the backward of N",
            (Stage.OPTIMIZER_STEP,): " right after the fused backward of N",
            (): " after the optimizer step of N",
        }[tuple(before)]
    if mode.updates_before_step:
        parts.append("the gradients of N's tables before those of its dense weights")
    elif mode.step_of(Stage.EMBEDDING_UPDATE) is not None:
        parts.append("but the update of N after the forward of N+1")
    return ", ".join(parts) or "nothing"


def _held(mode: Schedule) -> str:
    ids, rows, update = (
        mode.step_of(Stage.INPUT_DATA_DIST),
        mode.step_of(Stage.EMBEDDING_LOOKUP),
        mode.step_of(Stage.EMBEDDING_UPDATE),
    )
    amounts = (
        (mode.max_offset, "inputs"),
        (ids.offset if ids else 0, "received ids"),
        (rows.offset if rows else 0, "embeddings"),
        (-update.offset if update else 0, "gradients"),
    )
    return ", ".join(f"{what} of {number}" for number, what in amounts if number) or "nothing"


if __name__ == "__main__":
    print(modes_table())
