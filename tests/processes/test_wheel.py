"""The wheel contains `spmd` and nothing beside it, and trains in a folder where `models` is the user's own module."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.programs import ROOT

FAMILIES = ("models", "partition_rules", "name_maps", "examples")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "spmd_command.py", "spmd", *FAMILIES)
TRAIN = """
import models
import spmd.cli
import spmd.models.llama
assert models.OWN
assert spmd.models.llama.__file__.startswith({installed!r}), spmd.models.llama.__file__
spmd.cli.main(["train", "demo", "--steps", "40", "--devices", "2", "--mesh.data", "1", "--mesh.fsdp", "2",
    "--mesh.tensor", "1", "--data.sequence", "64", "--data.batch", "4", "--data.source", "*.txt",
    "--evaluate.tokens", "256", "--sample.tokens", "4", "--out", "run"])
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def source_names() -> set[str]:
    """Modules of the repository by their paths in a wheel."""
    folders = ("spmd", *(f"spmd/{family}" for family in FAMILIES))
    names = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).glob("**/*.py")
    }
    return {"spmd_command.py", *names}  # the command's process starts outside of the package


def wrong_names(names: Iterable[str]) -> list[str]:
    """What is wrong with the names of the files in a wheel: strangers at the top, and modules that are missing."""
    names = list(names)
    top = {name.partition("/")[0] for name in names}
    ours = {"spmd", "spmd_command.py"}
    strangers = sorted(name for name in top - ours if not name.endswith(".dist-info"))
    return strangers + sorted(source_names() - set(names))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy that keeps the links."""
    folder = tmp_path_factory.mktemp("built")
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, sources / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, ".", cwd=sources)
    sdist = f"import setuptools.build_meta; setuptools.build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", sdist, cwd=sources)
    return folder


def test_the_wheel_contains_spmd_only(built: Path) -> None:
    """Its top-level names are `spmd`, its command and the metadata; every module is in it."""
    (wheel,) = built.glob("*.whl")
    assert not wrong_names(zipfile.ZipFile(wheel).namelist())


def test_control_a_stranger_and_a_missing_module_are_found() -> None:
    """A top-level `models`, and a wheel without the rules."""
    names = sorted(source_names())
    assert wrong_names([*names, "spmd-1.dist-info/METADATA"]) == []
    assert wrong_names([*names, "models/llama.py", "build.txt"]) == ["build.txt", "models"]
    assert wrong_names(set(names) - {"spmd/partition_rules/llama.py"}) == [
        "spmd/partition_rules/llama.py"
    ]


def test_the_source_distribution_contains_the_families(built: Path) -> None:
    """As files, so that a wheel can be built from it anywhere."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = [member.name.partition("/")[2] for member in file.getmembers() if member.isfile()]
    assert not [family for family in FAMILIES if f"spmd/{family}/__init__.py" not in names]
    assert "spmd/models/llama.py" in names


@pytest.mark.soak
def test_the_installed_wheel_trains_beside_a_module_named_models(
    built: Path, tmp_path: Path
) -> None:
    """`import models` is the user's, `spmd.models` comes from the wheel, and a shipped config runs."""
    (wheel,) = built.glob("*.whl")
    installed = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", installed)
    run(*pip, wheel, cwd=tmp_path)
    user = tmp_path / "user"
    user.mkdir()
    (user / "models.py").write_text("OWN = True\n", encoding="utf-8")
    lines = [f"line {n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(400)]
    for part in range(4):
        (user / f"{part}.txt").write_text("".join(lines[part::4]), encoding="utf-8")
    script = TRAIN.format(installed=str(installed))
    printed = run(
        sys.executable, "-c", script, cwd=user, PYTHONPATH=str(installed), JAX_PLATFORMS="cpu"
    )
    assert "step 40/40" in printed
    assert (user / "run" / "checkpoints" / "40").is_dir()
