"""What another mode would take: tried within the training by `pipeline="auto"`, or priced from a measured window.

`tuner.py` tries arms (`arms.py`) in blocks of batches, which `trial.py` compares. `prices.py` walks the tables of modes
with the costs that `costs.py` reads off a measured step.
"""

from .arms import TRIED as TRIED
from .arms import Arm as Arm
from .auto import Auto as Auto
from .auto import resolve_auto as resolve_auto
from .costs import Bags as Bags
from .costs import Costs as Costs
from .costs import costs_of as costs_of
from .costs import mean_costs as mean_costs
from .costs import over_ranks as over_ranks
from .costs import shrunk as shrunk
from .costs import with_replicas as with_replicas
from .prices import can_be_priced as can_be_priced
from .prices import price_table as price_table
from .prices import prices as prices
from .tuner import Tuner as Tuner
