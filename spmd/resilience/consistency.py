"""Agreement of all processes before the first step: where they differ, all of them stop.

Processes that run different programs do not fail: they deadlock in the first collective that only
some of them reach, or train something else. So each states its config, plan, versions and data, and
all statements are compared.
"""

import functools
import hashlib
import json
from pathlib import Path

from spmd.distributed.differences import Statements, differences
from spmd.distributed.hosts import gather_json
from spmd.errors import AgreementError


def check_hosts_agree(statements: Statements) -> None:
    """Compare the statements of all processes.

    Every process makes this call, and all raise the same error.
    """
    text = json.dumps(statements, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # Digests first: they are short, and almost always equal.
    digests = gather_json(digest)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(other) for other in gather_json(text)]
    title = "Processes disagree, none starts:"
    raise AgreementError(title, differences(everyone))


@functools.cache  # it is read for the processes and for the compiled step
def source_fingerprint() -> str:
    """Return a digest of the source of this package and of the packages shipped with it."""
    package = Path(__file__).resolve().parents[1]
    paths = set(package.rglob("*.py"))
    for name in ("models", "partition_rules", "name_maps"):  # links, which rglob does not follow
        paths.update((package / name).glob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
