"""Batches balanced across ranks: samples are exchanged so that all ranks have batches of near-equal cost."""

from .assignment import assign as assign
from .balancer import Balanced as Balanced
from .balancer import Balancer as Balancer
from .balancer import Exchange as Exchange
from .options import Balance as Balance
from .options import check_balance as check_balance
