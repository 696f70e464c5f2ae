"""Published steps of other model families are predicted within bars, fitted without the family (a minute)."""

import pytest

from benchmarks import backtest
from benchmarks.published_rows import ROWS, read_rows
from spmd.chips import CHIPS

pytestmark = pytest.mark.soak

BARS = {"tpu": 0.08, "cuda": 0.06}
"""Platform → mean error of dense steps of a chip with at least 8 rows."""
_MANY = 8


@pytest.fixture(scope="module")
def results():
    return backtest.run(read_rows(str(ROWS)), None)[0]


def test_dense_steps(results) -> None:
    """Closer than the bars, and than a constant MFU."""
    judged = []
    for chip, result in results.items():
        found = result.kinds.get("dense")
        if found is not None and found.rows >= _MANY:
            judged.append(chip)
            assert found.mape <= BARS[CHIPS[chip].platform], (chip, found.mape)
            assert found.mape < found.baseline, chip
    assert judged == ["a100-40gb", "a100", "h100", "v5e", "v5p", "v6e"]


def test_steps_of_8_bits(results) -> None:
    """Those in pipelines too: within 15 % on each chip, and each kind closer than a constant MFU."""
    for chip, result in results.items():
        kinds = {"8 bits", "pipelines"} & result.kinds.keys()
        if not kinds:
            continue
        rows = [row for row in result.predictions if row.job.kind in kinds]
        assert backtest.mean_error(rows) <= 0.15, chip
        for kind in kinds:
            assert result.kinds[kind].mape < result.kinds[kind].baseline, (chip, kind)


def test_shipped_ranges_hold_left_out_rows(results) -> None:
    """At least 85 % of each chip and kind, of predictions by the rows of other families."""
    for chip, result in results.items():
        rates = CHIPS[chip].closed
        assert rates is not None
        for kind, found in result.kinds.items():
            limit = rates.spread_of(kind)
            if limit is None:  # "range not known"
                assert kind == "4 bits"
                continue
            own = [row for row in result.predictions if row.job.kind == kind]
            assert len(own) == found.rows
            assert backtest.share_within(own, limit) >= 0.85, (chip, kind)
