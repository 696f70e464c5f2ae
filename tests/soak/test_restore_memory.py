"""A process that restores a checkpoint holds one state and what it reads at a time, never two states."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT

ARRAYS, SHAPE = 8, (4096, 4096)
STATE = ARRAYS * 4096 * 4096 * 4

SAVE = """
spmd.checkpoint.arrays.save_arrays(folder, {
    f"w{i}": jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=split)(jax.random.key(i))
    for i in range(count)
})
"""
RESTORE = """
before = peak_kib()
wanted = {f"w{i}": jax.ShapeDtypeStruct(shape, jax.numpy.float32, sharding=split) for i in range(count)}
state = jax.block_until_ready(spmd.checkpoint.arrays.restore_arrays(folder, wanted, ()))
peak = peak_kib() - before
print(peak * 1024, spmd.checkpoint.arrays.bytes_read())
"""
START = """
import sys
from pathlib import Path
import jax, spmd, spmd.checkpoint.arrays
spmd.simulate_devices(8)
split = jax.sharding.NamedSharding(spmd.make_mesh(fsdp=8), jax.sharding.PartitionSpec("fsdp"))
def peak_kib():  # not ru_maxrss, which begins with that of the process that started this one
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
folder, count, shape = Path(sys.argv[1]), int(sys.argv[2]), (4096, 4096)
"""
TWICE = RESTORE.replace(
    "peak =", "again = spmd.checkpoint.arrays.restore_arrays(folder, wanted, ())\npeak ="
)


def run(program: str, folder: Path) -> list[int]:
    """The numbers that a program prints in a process of its own."""
    command = [sys.executable, "-c", START + program, str(folder), str(ARRAYS)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(word) for word in done.stdout.split()]


@pytest.mark.soak
def test_a_restored_state_is_in_memory_once(tmp_path: Path) -> None:
    """The peak is below 1.4 states, and each byte is read once; two states are seen (the control).

    Orbax before 0.12.5 holds up to 1.8.
    """
    version = tuple(map(int, importlib.metadata.version("orbax-checkpoint").split(".")[:3]))
    most = 1.4 if version >= (0, 12, 5) else 1.8
    folder = tmp_path / "state"
    run(SAVE, folder)
    peak, read = run(RESTORE, folder)
    assert peak < most * STATE
    assert STATE <= read < 1.01 * STATE
    twice, read = run(TWICE, folder)
    assert twice > 1.9 * STATE
    assert read > 1.9 * STATE
