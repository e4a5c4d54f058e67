"""Communication between ranks besides the tables' collectives: process groups, consensus, the cause of a failure.

`gloo_alltoall.py` is an all-to-all for gloo between hosts that posts its receives first; `packed_alltoall.py` is one
all-to-all for several tensors.
"""

from . import groups as groups
from .consensus import ASK_FOR_LAST as ASK_FOR_LAST
from .consensus import MAX_INTERVAL as MAX_INTERVAL
from .consensus import SKIP_ALIKE as SKIP_ALIKE
from .consensus import Answer as Answer
from .consensus import Consensus as Consensus
from .consensus import Group as Group
from .consensus import Lowest as Lowest
from .consensus import PollInterval as PollInterval
from .consensus import StepFlags as StepFlags
from .consensus import check_none_batches as check_none_batches
from .consensus import gather_objects as gather_objects
from .consensus import together as together
from .consensus import warn_on_rank_zero as warn_on_rank_zero
from .failures import FirstCause as FirstCause
from .failures import Store as Store
from .failures import default_store as default_store
from .failures import is_told_last as is_told_last
from .failures import tell_last as tell_last
from .failures import timed_out as timed_out
from .groups import CONSENSUS as CONSENSUS
from .mismatches import Mismatches as Mismatches
from .packed_alltoall import PackedExchange as PackedExchange
from .packed_alltoall import Part as Part
from .sockets import remember_sockets as remember_sockets
from .wrapped_work import Issue as Issue
from .wrapped_work import WrappedWork as WrappedWork
from .wrapped_work import wrap_collectives as wrap_collectives
