"""Ranks on GPUs, and the tests that a short time on a GPU is for."""

import importlib.util
import os
import re
from collections.abc import Callable

import pytest
import torch

from ..support.ranks import Ranks

collect_ignore = [] if importlib.util.find_spec("pyarrow") else ["test_deltas_cuda.py"]

SHARE = "TESTS_SHARE_GPU"  # set, two ranks share one GPU, so that all-to-alls run: NCCL then takes them for two hosts

FIRST = re.compile(
    r"test_streams_cuda|one_stale_lookup|a_graph_made_in_a_backward|between_a_lookup_and_its_backward|makes_the_host_wait"
    r"|changes_nothing\[(fused_sparse_dist|split_backward|semi_sync)-"
    r"|does_not_write_what_is_still_read|(plain_loop|delayed_updates)\[\w+-data_dist-table_wise\]"
    r"|read_of_sizes\[fused_sparse_dist-dedicated|rate_of_its_step\[fused_sparse_dist-dedicated-table_wise\]"
)


@pytest.fixture
def gpus(get_ranks: Callable[..., Ranks]) -> Ranks:
    """As many ranks as there are GPUs, two at most, or two on one GPU."""
    if os.environ.get(SHARE):
        return get_ranks(2, "cuda", num_nodes=2)
    return get_ranks(min(2, torch.cuda.device_count()), "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests to run first; what other versions warn of is no error on a machine with a GPU."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))
            if FIRST.search(item.nodeid):
                item.add_marker(pytest.mark.gpu_first)
