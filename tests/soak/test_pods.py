"""The step of a large job, as the compilers of pods make it, holds, sends and computes no more than its bars."""

import pytest

from benchmarks.pods import JOBS, measure, missed
from spmd.analysis.topology import missing_extra

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("job", [pytest.param(job, id=job.name) for job in JOBS if missing_extra(job.machine) is None])
def test_bars(job) -> None:
    """Temporaries, bytes on the wire and cycles of one device, in minutes for each job."""
    assert not missed(measure(job), job.bars)
