"""Record spans of a step or read them from torch.profiler traces; compute, report and draw the overlap."""

from . import report
from .draw_png import check_matplotlib, write_png
from .host_syncs import HostSync, record_host_syncs, sync_lines
from .overlap import Breakdown, break_down, mean, overlapped_by
from .recorder import HostTimestamps, SpanRecorder, timestamps_of
from .report import as_report, summarize
from .spans import ALL_TO_ALLS, HOST_LANE, Category, Interval, Span
from .steps import with_mode
from .torch_trace import read_trace
from .trace_file import write_trace
