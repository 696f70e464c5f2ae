"""JAX's persistent compilation cache, to resume a run without compilation."""

import contextlib
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from spmd.errors import ConfigError, Problem

_HIT = "/jax/compilation_cache/cache_hits"
"""JAX's event of a program that was read from the cache."""


def cache_dir(configured: str) -> Path | None:
    """Return the cache's folder, None for no cache.

    `configured` is a folder, "none", or empty for JAX's own setting if there is one, else
    `~/.cache/spmd/programs`. The last has a folder for each kind of processor: machines may share a
    home folder, and programs for simulated devices run on one kind of processor.
    """
    if configured == "none":
        return None
    if configured:
        try:
            Path(configured).expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"{configured} cannot be made: {error.strerror}"
            problem = Problem("compilation_cache_dir", what, fix="another folder")
            raise ConfigError("Programs cannot be cached:", [problem]) from error
    folder = configured or jax.config.values["jax_compilation_cache_dir"]
    if folder:
        return Path(folder).expanduser()
    digest = hashlib.sha256(processor().encode()).hexdigest()
    return Path("~/.cache/spmd/programs").expanduser() / digest[:16]


def processor() -> str:
    """Return a text for this kind of processor, different for other sets of instructions."""
    return platform.machine() + platform.processor() + _instructions_line()


def instructions() -> list[str]:
    """Return the names of the sets of instructions of this processor; empty if unknown."""
    _, _, words = _instructions_line().partition(":")
    return words.split()


def _instructions_line() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return ""


def cache_fault(stages: int) -> str | None:
    """Return the reason not to read programs of a pipeline of `stages` from a cache, or None.

    XLA:CPU keeps collectives in order by a resource that they share. In a program that is read
    back from the cache, each has a resource of its own. Where stages take different branches,
    devices then wait for each other in different collectives.
    """
    if stages == 1 or jax.default_backend() != "cpu":
        return None
    return (
        "no compilation cache: a pipeline on CPUs can hang in programs that JAX "
        f"{jax.__version__} reads back"
    )


@contextlib.contextmanager
def without_faulty_cache(stages: int) -> Iterator[None]:
    """Disable the cache for a pipeline of `stages` where its programs must not be read back."""
    if not cache_fault(stages):
        yield
        return
    with compilation_cache(None):
        yield


@contextlib.contextmanager
def compilation_cache(folder: Path | None) -> Iterator[None]:
    """Cache programs in `folder` if they compile for a second or more; None disables the cache."""
    before = jax.config.values["jax_compilation_cache_dir"]
    _use(None if folder is None else str(folder))
    try:
        yield
    finally:
        _use(before)


@contextlib.contextmanager
def watch_cache_hits() -> Iterator[list[str]]:
    """Yield a list, with an item for each program read from the cache inside the block."""
    hits = list[str]()

    def listen(event: str, **_: object) -> None:
        if event == _HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _use(folder: str | None) -> None:
    reset_cache()  # JAX reads the setting once
    jax.config.update("jax_compilation_cache_dir", folder)
