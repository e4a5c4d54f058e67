"""Row-wise tables as on a device, which alone knows how many ids go to each rank. Functions that ranks run."""

from unittest import mock

from lightning_overlap.sparse import input_sizes

from ..profiling import syncs
from ..support import fits
from ..support.cases import Case
from ..support.reference import Result


def fit(case: Case, pipeline: str) -> Result:
    """Train; fail if no sizes were counted on the device."""
    counted = mock.patch.object(input_sizes._Counted, "add_to", autospec=True, side_effect=input_sizes._Counted.add_to)
    with mock.patch.object(input_sizes, "is_device", return_value=True), counted as calls:
        result = fits.fit(case, pipeline)
    assert calls.call_count > 0
    return result


def syncs_of_steps(case: Case, pipeline: str) -> list[str]:
    with mock.patch.object(input_sizes, "is_device", return_value=True):
        return syncs.of_steps(case, pipeline)
