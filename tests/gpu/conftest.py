"""The rank processes of the distributed tests, on GPUs."""

from ..distributed.conftest import _pools, get_ranks

__all__ = ["_pools", "get_ranks"]
