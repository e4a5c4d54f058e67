"""What `record_stream` reaches."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap.runtime import streams, tensors_in
from lightning_overlap.schedules import StreamName


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    opaque: Any


class Opaque:
    """Holds its memory where nobody finds it."""

    __slots__ = ("recorded_on",)

    def record_stream(self, stream: Any) -> None:
        self.recorded_on = stream


def make_batch() -> Batch:
    inverse = torch.tensor([[0, 1, 0], [0, 0, 0]])
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        weights=torch.ones(3),
        lengths=torch.ones(3, dtype=torch.long),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], inverse),
    )
    return Batch(torch.ones(3), kjt, Opaque())


CUDA = torch.device("cuda")


def test_variable_batch_sizes_leave_no_tensor_out() -> None:
    batch = make_batch()
    kjt = batch.sparse
    inverse = kjt.inverse_indices()[1]
    wanted = {id(tensor) for tensor in (batch.dense, kjt.values(), kjt.lengths(), kjt.weights(), inverse)}
    assert wanted <= {id(tensor) for tensor in tensors_in(batch)}


def test_an_object_with_a_record_stream_of_its_own_is_told() -> None:
    batch = make_batch()
    streams._Memory(batch, CUDA).record("stream")  # type: ignore[arg-type]
    assert batch.opaque.recorded_on == "stream"


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_leaves_are_held_in_any_mode(mode: Any) -> None:
    """An evaluation on CUDA begins in inference mode."""
    weight, view = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2)).view(2)
    with mode():
        [node] = streams.Streams().hold_leaves([weight, view, torch.ones(2)], StreamName.IDLE)
    assert (weight * 2).grad_fn.next_functions[0][0] is node  # type: ignore[union-attr]
