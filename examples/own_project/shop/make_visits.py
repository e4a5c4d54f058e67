"""Write `visits/train.parquet`, `val.parquet` and `test.parquet`: `python -m shop.make_visits visits`."""

import sys
from pathlib import Path

import numpy as np

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as err:
    raise ImportError(f"Parquet files need pyarrow ({err}): pip install pyarrow") from err

NUM_USERS, NUM_ITEMS = 500, 200
ROWS = {"train": 20_000, "val": 4_000, "test": 4_000}


def main(folder: Path) -> None:
    """Write the three files; a user clicks on items that are like those of the user's taste."""
    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(NUM_USERS, 4)), rng.normal(size=(NUM_ITEMS, 4))
    folder.mkdir(parents=True, exist_ok=True)
    for split, num_rows in ROWS.items():
        user, item = rng.integers(NUM_USERS, size=num_rows), rng.integers(NUM_ITEMS, size=num_rows)
        clicked = rng.random(num_rows) < 1 / (1 + np.exp(-2 * (users[user] * items[item]).sum(axis=1)))
        liked = (users @ items.T).argsort(axis=1)[:, -20:]  # of each user; a visit's history has 0 to 5 of them
        history = [rng.choice(liked[one], size=rng.integers(6), replace=False) for one in user]
        columns = {"user": user, "item": item, "history": pa.array(history), "clicked": clicked}
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")
        print(f"{folder / f'{split}.parquet'}: {num_rows} visits")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
