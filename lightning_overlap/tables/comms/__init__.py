"""Quantized communication: `quantized_comms.py` checks precisions, `overflow.py` warns if gradients do not fit FP16."""

from .overflow import OverflowWatch as OverflowWatch
from .quantized_comms import Codecs as Codecs
from .quantized_comms import QuantizedComms as QuantizedComms
from .quantized_comms import check_plan as check_plan
from .quantized_comms import check_quantized_comms as check_quantized_comms
from .quantized_comms import codecs_of as codecs_of
from .quantized_comms import compression as compression
from .quantized_comms import resolve_quantized_comms as resolve_quantized_comms
