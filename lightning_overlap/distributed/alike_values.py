"""Give tensors the values of rank 0 on all ranks, as DistributedDataParallel does; only what differs is sent."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64

from .consensus import gather_if_unequal

PIECE_BYTES = 1 << 24  # sent at once: no rank needs more memory for it


class Value(NamedTuple):
    """What ranks compare of a tensor."""

    form: str  # shape, dtype and the like: ranks that differ here cannot have the same values
    checksum: str


def take_from_rank_zero(tensors: Mapping[str, Tensor], forms: Mapping[str, str], group: dist.ProcessGroup) -> list[str]:
    """Give tensors, by name, the values of rank 0; return the names of those that differed, in its order.

    All ranks of a group on the host call this. They compare checksums, so that tensors that are alike cost reading
    them once; the others are sent by rank 0 in pieces, straight into the memory of each rank's tensor. A tensor on
    `meta` has no values. `forms` has further words about some tensors in which the ranks must not differ.

    Raises:
        ValueError: On all ranks, if a tensor is missing on one or has another form there.
    """
    mine = {name: Value(_form(one) + forms.get(name, ""), _checksum(one)) for name, one in tensors.items()}
    of_ranks = gather_if_unequal(mine, group)
    of_first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for name in [*of_first, *other]:
            if name not in other or name not in of_first or other[name].form != of_first[name].form:
                there, here = (found[name].form if name in found else "not there" for found in (other, of_first))
                raise ValueError(
                    f"{name} is {there} on rank {rank}, and {here} on rank 0. All ranks have to make the same module; "
                    "its values may be loaded on rank 0 alone."
                )
    different = [name for name in of_first if any(other[name] != of_first[name] for other in of_ranks)]
    for name in different:
        _broadcast(tensors[name], group)
    return different


def _form(tensor: Tensor) -> str:
    on_meta = " on the meta device" if tensor.is_meta else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{on_meta}"


def _checksum(tensor: Tensor) -> str:
    found = xxh3_64()
    for piece in _pieces(tensor):
        found.update(_bytes_of(piece).numpy().data)
    return found.hexdigest()


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    for piece in _pieces(tensor):
        sent = _bytes_of(piece)
        dist.broadcast(sent, group_src=0, group=group)
        if group.rank() > 0:
            piece.copy_(sent.view(piece.dtype).view(piece.shape))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a tensor, a few at a time: views of its memory."""
    if tensor.is_meta or not tensor.numel():
        return
    rows = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    row_bytes = rows[0].numel() * rows.element_size()
    yield from rows.split(max(1, PIECE_BYTES // row_bytes))


def _bytes_of(piece: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host; they are its own memory if it is there in one piece."""
    return piece.cpu().contiguous().view(-1).view(torch.uint8)
