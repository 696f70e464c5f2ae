"""The ledger's estimate of a whole step beside what XLA allocates for it."""

import pytest

from tests.programs import run_script

MEASURE = """
    import dataclasses, json, sys
    from spmd.distributed.initialize import initialize
    from spmd.run.load_config import load_config
    from spmd.sharding.mesh import MeshShape
    from spmd.run.build import config_mesh, make_setup
    from spmd.run.planned_step import estimate_step, compile_step
    initialize(8)
    totals = {}
    for zero, remat in ((0, "save:attention_out,mlp_hidden"), (3, "full")):
        mesh = MeshShape(data=2, fsdp=4)
        config = dataclasses.replace(load_config("demo"), mesh=mesh, zero=zero, remat=remat)
        setup = make_setup(config, config_mesh(config))
        totals[f"{zero} {remat}"] = [estimate_step(setup, "cpu").total, compile_step(setup).memory.total]
    print(json.dumps(totals))
"""


@pytest.mark.soak
def test_the_estimate_is_near_what_is_compiled():
    """The demo model over `data` and `fsdp` as it is compiled with all optimisations, within a quarter.

    With `tensor=2` it is not: there the estimate of ZeRO 3 with remat full was 89 % too high on 22
    November 2026, since XLA:CPU holds half as much as before the residual stream was split over
    `tensor`, and the estimate does not follow.
    """
    for case, (estimated, compiled) in run_script(MEASURE).items():
        assert estimated == pytest.approx(compiled, rel=0.25), case
