"""Nothing in the repository names a package registry or the machine it was written on."""

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Written in two parts, so that this file does not contain what it looks for.
REGISTRIES = (
    "pypi" + r"\.org",
    "files" + r"\.pythonhosted\.org",
    "registry" + r"\.npmjs",
    r"https?://[^\s\"'<>)]*(?:/" + r"simple|/" + r"packages/|registry\.)",
    r"--(?:extra-)?" + "index-url",
)
MACHINE_PATHS = (
    r"(?<![\w.~$}-])/" + r"(?:root|home|work|Users)/",
    "/tmp" + r"/v3\d",
)
TRACES = re.compile("|".join((*REGISTRIES, *MACHINE_PATHS)))


def repository_files() -> Iterator[Path]:
    """Every file that is not ignored: those that are, or will be, tracked."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    ignored = [".git", *(line.rstrip("/") for line in lines)]

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if (
                any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
                or (path / "pyvenv.cfg").exists()
            ):
                continue
            if path.is_dir() and not path.is_symlink():
                yield from walk(path)
            elif path.is_file():
                yield path

    return walk(ROOT)


def traces(text: str) -> list[str]:
    """What a text names that it must not, as `line: trace`."""
    return [
        f"{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in TRACES.finditer(line)
    ]


def test_no_traces() -> None:
    """No text file names a registry host or an absolute path of a developer's machine."""
    found = []
    files = list(repository_files())
    for path in files:
        content = path.read_bytes()
        if b"\0" not in content:
            found += [
                f"{path.relative_to(ROOT)}:{trace}" for trace in traces(content.decode("utf-8"))
            ]
    assert not found
    assert {"pyproject.toml", "constraints.txt", "Makefile"} <= {path.name for path in files}


def test_no_traces_control() -> None:
    """Each kind of trace is found, and what only looks like one is not."""
    bad = [
        "https://host.invalid/" + "simple",
        "https://host.invalid/" + "packages/a.whl",
        "pypi" + ".org/project/jax",
        "pip install --" + "index-url x",
        "cd /" + "work/main",
        'path = "/' + 'root/x"',
        "/" + "home/me/spmd",
        "/tmp" + "/v311/bin",
    ]
    assert [bool(traces(line)) for line in bad] == [True] * len(bad)
    good = [
        "https://docs.invalid/easy",
        "frame/" + "work/x",
        "src/packages/a",
        "~/" + "work/x",
        "runs/demo",
        "/tmp/x",
    ]
    assert not [line for line in good if traces(line)]
