"""Tests here compile nothing, which is measured."""

from collections.abc import Iterator

import jax
import pytest

COMPILED: list[str] = []


def count(event: str, seconds: float, **_: object) -> None:
    """Takes note of each program that XLA compiles, or that is found compiled."""
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(f"{seconds:.2f} s")


@pytest.fixture(scope="session", autouse=True)
def counting() -> None:
    """Counts from now on."""
    jax.monitoring.register_event_duration_secs_listener(count)


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """Fails a test of this folder that compiles; it belongs into another one.

    A random key, which some tests need as a value, takes tiny programs. They are there before, in
    each test: programs may have been forgotten since the last one (`room_for_programs`).
    """
    jax.random.key_data(jax.random.key(0))
    COMPILED.clear()
    yield
    assert not COMPILED, f"a unit test compiled {len(COMPILED)} programs: move it to tests/numerics"
