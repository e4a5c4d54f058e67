"""Weights that a user sets before sharding, and whole tables that `load_state_dict` takes after it."""

import pytest

from ..plugin.table_reads import Fit, Table
from ..support.ranks import Ranks
from . import loaded_tables

SHARDINGS = ("table_wise", "row_wise", "column_wise")
OF_SEQUENCES = Fit(tuple(map(Table, SHARDINGS)), sequence=True, num_steps=3)
POOLED = Fit(tuple(map(Table, (*SHARDINGS, "replicated", "grid_shard"))), num_steps=3)
FITS = {"sequences": OF_SEQUENCES, "bags": POOLED}


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_fit_end"])
def test_some_tables_are_loaded_whole(ranks: Ranks, kind: str, hook: str) -> None:
    for wrong in ranks.run(loaded_tables.loads, FITS[kind], hook):
        assert wrong == []


@pytest.mark.parametrize("kind", FITS)
def test_tables_that_are_missing_or_of_other_shapes_are_named(two_ranks: Ranks, kind: str) -> None:
    key = "ebc.embeddings.t0.weight" if kind == "sequences" else "ebc.embedding_bags.t0.weight"
    for found in two_ranks.run(loaded_tables.errors_of_loads, FITS[kind]):
        assert f'Missing key(s) in state_dict: "{key}"' in found["missing"]
        assert (
            f"{key}: load_state_dict got a tensor of shape (8, 8), and the table has the shape (7, 8)"
            in found["longer"]
        )
        assert f"{key}: load_state_dict got a tensor of shape (3, 8)" in found["part"]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_table_beside_one_on_meta_keeps_its_values(ranks: Ranks, sequence: bool, device: str) -> None:
    """`device` is a string, which equals no torch.device."""
    for sharding in SHARDINGS:
        fit = Fit(2 * (Table(sharding, num_rows=12),), sequence=sequence)
        assert all(ranks.run(loaded_tables.real_beside_meta, fit, device)), sharding


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_a_weight_of_another_shape_than_its_config_is_named_on_all_ranks(
    ranks: Ranks, sequence: bool, sharding: str
) -> None:
    fit = Fit(2 * (Table(sharding, num_rows=12),), sequence=sequence)
    for error in ranks.run(loaded_tables.error_of_shape, fit, (0, 1)):
        assert error.startswith(
            "ValueError: the weight of table ebc.t0 has the shape (5, 8), and its config the shape (12, 8)"
        )
    for error in ranks.run(loaded_tables.error_of_shape, fit, (1,)) if ranks.world_size > 1 else ():
        assert error.startswith("ValueError: ebc.embed")
        assert "t0.weight is (5, 8) float32 on rank 1, and (12, 8) float32 on rank 0" in error
