"""Five thousand examples of the sweep: 4,000 on 8 devices and 1,000 on 16, none wrong and none refused.

A process for each part: compiled programs are not given back.
"""

import json

import pytest

from tests.programs import FAST_TO_COMPILE, run_script

pytestmark = pytest.mark.soak

COUNT = 250
PARTS = [(seed, 8) for seed in range(1000, 1016)] + [(seed, 16) for seed in range(2000, 2004)]
SCRIPT = """
    import json, sys, warnings
    from spmd.sharding.mesh import simulate_devices

    seed, count, devices = map(int, sys.argv[1:])
    simulate_devices(devices)
    warnings.simplefilter("ignore")
    from tests.sweep.run import sweep

    found = sweep(seed, count, devices)
    wrong = [str(result) for result in found if result.difference.refused or not result.difference.ok]
    print(json.dumps([len(found), wrong]))
"""


@pytest.mark.parametrize(("seed", "devices"), PARTS)
def test_every_example_is_as_on_one_device(seed, devices):
    """Values, first and second derivatives."""
    count, wrong = run_script(SCRIPT, str(seed), str(COUNT), str(devices), **FAST_TO_COMPILE)
    assert (count, wrong) == (COUNT, []), json.dumps(wrong, indent=2)
