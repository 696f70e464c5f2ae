"""Calibration of each kind of chip, fitted to published steps: `python -m benchmarks.backtest --rows FILE --fit`.

Rates of a chip without published rows are those of its kin: b200 and h200 of h100.
"""

from spmd.step_time.closed_form import ClosedRates
from spmd.step_time.timeline import Rates

_H100 = ClosedRates(0.750, 550, 0.178, 2.20, 0.799, 3.0e-5, 0.02, spread=0.09)
CLOSED = {
    "v4": ClosedRates(0.790, 292, 0.434, 1.51, 0.477, 1.0e-5, 0.020, spread=0.17),
    "v5e": ClosedRates(0.895, 293, 0.449, 1.50, 0.481, 1.0e-5, 0.021, spread=0.05),
    "v5p": ClosedRates(0.992, 294, 0.433, 1.50, 0.497, 1.0e-5, 0.020, spread=0.14),
    "v6e": ClosedRates(0.638, 335, 0.369, 1.59, 0.465, 1.0e-5, 0.022, spread=0.22),
    "tpu7x": ClosedRates(0.737, 302, 0.471, 1.50, 0.500, 1.0e-5, 0.020, spread=0.05),
    "a100": ClosedRates(0.955, 482, 0.311, 1.67, 0.917, 3.0e-5, 0.02, spread=0.10),
    **dict.fromkeys(("h100", "h200", "b200"), _H100),
}
"""Kind of chip → rates of the closed forms. The least spread is 5 %: published tables are not more exact."""

COMPILED = {
    "v4": Rates(1.068, 0.982, 0.622, 0.841, 0.0186, spread=0.10),
    "v5e": Rates(1.081, 0.976, 0.649, 0.734, 0.0197, spread=0.06),
    "v5p": Rates(1.154, 1.056, 0.638, 0.848, 0.0197, spread=0.15),
    "v6e": Rates(1.107, 1.031, 0.653, 0.797, 0.0185, spread=0.10),
    "tpu7x": Rates(1.213, 0.955, 0.641, 0.721, 0.0196, spread=0.10),
}
"""Kind of TPU → rates of compiled programs. Published steps are of other programs than ours, with other collectives."""
