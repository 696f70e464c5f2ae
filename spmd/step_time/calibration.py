"""Calibration of each kind of chip, fitted to published steps: `python -m benchmarks.backtest --rows FILE --fit`.

Rates of a chip without published rows are those of its kin: b200 and h200 of h100.
"""

from spmd.step_time.closed_form import ClosedRates
from spmd.step_time.timeline import Rates

CLOSED: dict[str, ClosedRates] = {}
"""Kind of chip → rates of the closed forms."""

COMPILED: dict[str, Rates] = {}
"""Kind of chip → rates of compiled programs."""
