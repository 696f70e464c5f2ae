"""When programs are read back from the compilation cache on disk."""

from pathlib import Path

import jax
import pytest

from spmd.training.compilation_cache import cache_dir, cache_fault, compilation_cache


@pytest.mark.parametrize(
    ("stages", "backend", "faulty"),
    [(2, "cpu", True), (1, "cpu", False), (2, "tpu", False)],
)
def test_pipelines_on_simulated_devices_read_nothing_back(
    stages: int, backend: str, faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert ("no compilation cache" in (cache_fault(stages) or "")) == faulty


def test_the_folder_is_the_configured_one_then_that_of_jax(tmp_path: Path) -> None:
    assert cache_dir("none") is None
    assert cache_dir(str(tmp_path / "made")) == tmp_path / "made"
    assert (tmp_path / "made").is_dir()
    with compilation_cache(tmp_path / "jax"):
        assert cache_dir("") == tmp_path / "jax"
    with compilation_cache(None):
        assert cache_dir("").parent.name == "programs"
