"""Law 9: a step makes the host wait for the device once, for the sizes of what is on its way."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from lightning_overlap import MODES
from lightning_overlap.profiling.host_syncs import record_host_syncs
from lightning_overlap.sparse.update_rates import kernel_rates

from ..support.cases import MIXED, SEQUENCE, TABLE_WISE, TWO_COLLECTIONS
from ..support.pairs import rotated
from ..support.ranks import Ranks
from . import syncs

CASES = {case.name: case for case in (TABLE_WISE, MIXED, SEQUENCE, TWO_COLLECTIONS)}
EARLY = [name for name, mode in MODES.items() if mode.has_sparse_stages]
PAIRS = [pairing for pairing in rotated(CASES, EARLY) if pairing.num_ranks == 2]
SIZES = "tolist: input_sizes.py wait"
ON_THE_HOST = "_local_scalar_dense: module.py backward"  # FBGEMM's CPU kernel of data-parallel tables, in C++


@pytest.mark.parametrize(
    ("name", "pipeline", "num_nodes"),
    [
        *(pytest.param(one.name, one.pipeline, 1, id=f"{one.name}-{one.pipeline}") for one in PAIRS),
        *(
            pytest.param("two_collections", mode, 2, id=f"two_hosts-{mode}")
            for mode in ("split_backward", "fused_sparse_dist")
        ),
    ],
)
def test_one_read_of_sizes_a_step(get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_nodes: int) -> None:
    """For all modules; TorchRec would read the lengths of what was received too, when the ids are there."""
    for found in get_ranks(2, num_nodes=num_nodes).run(syncs.of_steps, CASES[name], pipeline):
        counts = Counter(found)
        counts.pop(ON_THE_HOST, None)
        assert counts.pop(SIZES) == syncs.NUM
        assert not counts


@pytest.mark.parametrize("pipeline", [None, *(name for name in MODES if name not in EARLY)])
def test_lightning_reads_nothing_of_its_own(two_ranks: Ranks, pipeline: str | None) -> None:
    """With DDPStrategy it broadcasts a flag and reads it for every batch; in modes of `EARLY` nothing else is read."""
    for found in two_ranks.run(syncs.of_steps, TABLE_WISE, pipeline):
        reads = [text for text in found if "training_epoch_loop.py" in text]
        assert len(reads) == (syncs.NUM if pipeline is None else 0), found


def test_max_time_does_not_ask_by_the_group_of_the_gradients(two_ranks: Ranks) -> None:
    """Lightning's timer broadcasts for every batch; on the host's group no device is waited for."""
    assert two_ranks.run(syncs.broadcasts_on_the_default_group, max_time="00:01:00:00") == [0, 0]


@pytest.mark.parametrize(
    ("read", "operator"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.unique(x), "_unique2"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: x.cpu(), "cpu"),
    ],
)
def test_what_reads_a_tensor(read: Any, operator: str) -> None:
    tensor = torch.arange(6.0, requires_grad=True)
    with record_host_syncs() as found:
        torch.repeat_interleave(tensor, torch.arange(6), output_size=15)  # these do not
        (torch.relu(tensor * 2).view(2, 3).sum(0).to(torch.bfloat16) + 1).sum().backward()
        assert found == []
        read(tensor.detach())
    assert [sync.operator for sync in found][:1] == [operator]
    assert any(frame.filename == __file__ for frame in found[0].stack)


def test_fbgemm_keeps_the_learning_rate_on_the_host() -> None:
    kernel = SplitTableBatchedEmbeddingBagsCodegen([(4, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)])
    with record_host_syncs() as found:
        kernel_rates([kernel])
    assert [(sync.operator, sync.reads_host) for sync in found] == [("_local_scalar_dense", True)]
