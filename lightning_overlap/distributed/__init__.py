"""Face."""

from . import groups as groups
from .consensus import ASK_FOR_LAST as ASK_FOR_LAST
from .consensus import Agreement as Agreement
from .consensus import Answer as Answer
from .consensus import Flags as Flags
from .consensus import GroupAgreement as GroupAgreement
from .consensus import Rhythm as Rhythm
from .failures import FirstCause as FirstCause
from .failures import Store as Store
from .failures import default_store as default_store
from .groups import AGREEMENT as AGREEMENT
