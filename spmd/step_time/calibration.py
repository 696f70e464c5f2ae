"""Calibration of each kind of chip, fitted to published steps.

Fitted by `python -m benchmarks.backtest --rows FILE --fit`. Chips without published rows have the
rates of a similar one: b200 and h200 those of h100.
"""

from spmd.step_time.closed_form import ClosedRates
from spmd.step_time.timeline import Rates

_H100 = ClosedRates(0.750, 550, 0.178, 2.20, 0.799, 3.0e-5, 0.07, spread=0.09)
CLOSED = {
    "v4": ClosedRates(0.808, 291, 0.434, 1.51, 0.475, 1.0e-5, 0.068, spread=0.19),
    "v5e": ClosedRates(0.919, 293, 0.449, 1.50, 0.477, 1.0e-5, 0.067, spread=0.05),
    "v5p": ClosedRates(1.004, 294, 0.432, 1.50, 0.496, 1.0e-5, 0.068, spread=0.15),
    "v6e": ClosedRates(0.638, 332, 0.379, 1.58, 0.468, 1.0e-5, 0.080, spread=0.18),
    "tpu7x": ClosedRates(0.737, 302, 0.471, 1.50, 0.500, 1.0e-5, 0.070, spread=0.05),
    "a100": ClosedRates(0.955, 482, 0.311, 1.67, 0.917, 3.0e-5, 0.07, spread=0.10),
    **dict.fromkeys(("h100", "h200", "b200"), _H100),
}
"""Kind of chip → rates of the closed forms.

The least spread is 5 %: published tables are not more exact.
"""

COMPILED = {
    "v4": Rates(1.052, 1.058, 0.623, 0.922, 0.0581, spread=0.10),
    "v5e": Rates(1.036, 1.043, 0.649, 0.825, 0.0646, spread=0.05),
    "v5p": Rates(1.104, 1.136, 0.635, 0.938, 0.0613, spread=0.14),
    "v6e": Rates(1.109, 1.050, 0.682, 0.873, 0.0599, spread=0.10),
    "tpu7x": Rates(1.173, 0.994, 0.638, 0.835, 0.0612, spread=0.10),
}
"""Kind of TPU → rates of compiled programs.

The fit is to published steps of other frameworks' programs, with other collectives.
"""
