"""Record spans of a step or read them from torch.profiler traces; compute, report and draw the overlap."""

from . import report as report
from .draw_png import check_matplotlib as check_matplotlib
from .draw_png import write_png as write_png
from .host_syncs import HostSync as HostSync
from .host_syncs import record_host_syncs as record_host_syncs
from .host_syncs import sync_lines as sync_lines
from .overlap import Breakdown as Breakdown
from .overlap import break_down as break_down
from .overlap import mean as mean
from .overlap import overlapped_by as overlapped_by
from .recorder import HostTimestamps as HostTimestamps
from .recorder import SpanRecorder as SpanRecorder
from .recorder import timestamps_of as timestamps_of
from .report import as_report as as_report
from .report import summarize as summarize
from .spans import ALL_TO_ALLS as ALL_TO_ALLS
from .spans import HOST_LANE as HOST_LANE
from .spans import Category as Category
from .spans import Interval as Interval
from .spans import Span as Span
from .steps import with_mode as with_mode
from .torch_trace import read_trace as read_trace
from .trace_file import write_trace as write_trace
