"""Each collective of each shipped config has a cause, over the config's own axes, by the compilers of CPUs and TPUs."""

import json
import sys

import pytest

from benchmarks.pods import run
from spmd.analysis.topology import missing_extra, parse_topology
from spmd.run.load_config import load_config, shipped
from tests.programs import LITTLE_EFFORT, run_script

pytestmark = pytest.mark.soak

MACHINES = {4: "v5p:2x2x1", 8: "v5p:2x2x2"}
"""TPUs with memory for two of the largest layers, by their number."""
SCRIPTS = ("linen_model", "nnx_model", "vit_digits")
AUDIT = """
    import importlib, json, sys
    import spmd
    from spmd.analysis.collective_audit import audit_collectives

    class Audited(Exception):
        pass

    def fit(state, step, batches, **_):
        batch = next(iter(batches))
        plan, jaxpr = step.plan, step.trace(batch).jaxpr
        audited = audit_collectives(step.compile(batch), plan.mesh, plan=plan, jaxpr=jaxpr)
        print(json.dumps([[r.cause.kind, r.cause.text] for r in audited.records]))
        raise Audited

    spmd.fit = fit
    script, sys.argv = sys.argv[1], [sys.argv[1]]
    try:
        importlib.import_module(f"spmd.examples.{script}").main()
    except Audited:
        pass
"""


def plan(config, topology, sizes):
    """The record of `spmd plan` for the fewest layers of a config, on a mesh of two devices along each of its axes."""
    loaded = load_config(config)
    model = loaded.model
    layers = max(len(model.first) + max(len(model.group), 1) + len(model.last), 2)
    mesh = [
        part for axis in loaded.mesh.sizes for part in (f"--mesh.{axis}", str(sizes.get(axis, 1)))
    ]
    options = (
        *("--model.layers", str(layers), "--data.batch", "8", "--data.sequence", "512"),
        "--compile",
        "--json",
    )
    command = [
        sys.executable,
        "-m",
        "spmd_command",
        "plan",
        config,
        "--topology",
        topology,
        *mesh,
        *options,
    ]
    done = run(command, **LITTLE_EFFORT)
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("config", shipped())
def test_configs(config, platform) -> None:
    """Two devices along each axis that the config splits; own-text, which has one device, over fsdp."""
    sizes = {axis: 2 for axis, size in load_config(config).mesh.sizes.items() if size != 1} or {
        "fsdp": 2
    }
    topology = f"cpu:{2 ** len(sizes)}" if platform == "cpu" else MACHINES[max(4, 2 ** len(sizes))]
    if platform == "tpu":
        assert not missing_extra(parse_topology(topology))
        if len(sizes) == 1:
            sizes = dict.fromkeys(sizes, 4)
    records = plan(config, topology, sizes)["collectives"]
    assert records
    assert [r for r in records if r["cause"]["kind"] == "none"] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts(script) -> None:
    """Models of other libraries under a table of rules, too."""
    causes = run_script(AUDIT, script, JAX_PLATFORMS="cpu")
    assert len(causes) > 10
    assert [text for kind, text in causes if kind == "none"] == []
