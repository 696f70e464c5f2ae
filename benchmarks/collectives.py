"""What a side of `benchmarks/step.py` sends between devices, in the terms of `spmd.analysis.collective_record`."""

from collections.abc import Mapping
from typing import Any

from spmd.analysis.collective_audit import audit_collectives
from spmd.sharding.mesh import MeshShape, abstract_mesh


def describe(program: str, mesh: Mapping[str, int]) -> dict[str, Any]:
    """How many collectives of each kind and axes a program has, how often they run, and their payloads.

    Payloads are 10⁶ bytes per step and device.

    Args:
        program: `compiled.as_text()`.
        mesh: Axis → size.
    """
    audit = audit_collectives(program, abstract_mesh(MeshShape(**mesh)), backend="cpu")
    rows = {f"{kind} over {over}": records for (kind, over), records in audit.by_axes().items()}
    return {
        "collectives": {
            name: len({record.instruction for record in records}) for name, records in rows.items()
        },
        "collective_executions": {
            name: sum(r.executions for r in records) for name, records in rows.items()
        },
        "collective_megabytes": {
            name: round(sum(r.payload * r.executions for r in records) / 1e6, 3)
            for name, records in rows.items()
        },
    }
