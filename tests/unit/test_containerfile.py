"""The Containerfile builds what the project defines; no builder of images is needed to read it."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from spmd.job_files.kubernetes import KubernetesJob

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}


def mistakes(text):
    """Return what is wrong with a Containerfile: extras, Python, constraints, its user."""
    lines = [line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    found = [f"unknown instruction {word}" for word, _ in lines if word not in INSTRUCTIONS]
    extras = set(re.findall(r"EXTRA=(\w+)", text))
    found += [
        f"no extra {name}" for name in extras - set(PROJECT["project"]["optional-dependencies"])
    ]
    arguments = dict(rest.split("=") for word, rest in lines if word == "ARG")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    if f"(Python {arguments['PYTHON']})" not in constraints:
        found.append("constraints are for another Python")
    installs = [rest for word, rest in lines if word == "RUN" and "pip install" in rest]
    found += [
        f"not pinned: {rest}" for rest in installs if "--constraint constraints.txt" not in rest
    ]
    users = [rest for word, rest in lines if word == "USER"]
    if users != ["${UID}"] or arguments["UID"] == "0":
        found.append("the user is root")
    for word, rest in lines:
        if word == "FROM" and ":${PYTHON}-slim" not in rest:
            found.append(f"another base: {rest}")
    return found


def test_the_image_is_of_this_project():
    """Its extras exist, versions are pinned, for the Python of constraints.txt; its user is not root."""
    assert not mistakes(TEXT)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("EXTRA=tpu", "EXTRA=tpus"),
        ("ARG PYTHON=3.11", "ARG PYTHON=3.10"),
        (" --constraint constraints.txt", ""),
        ("ARG UID=1000", "ARG UID=0"),
        ("RUN useradd", "RUNN useradd"),
        ("-slim AS build", " AS build"),
    ],
)
def test_control_a_mistake_is_found(before, after):
    """Each of those that are looked for."""
    assert before in TEXT
    assert len(mistakes(TEXT.replace(before, after))) == 1


def test_what_is_built_is_in_the_context():
    """Files of the package that are ignored would be missing in the image."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    project = PROJECT["project"]
    needed = {"constraints.txt", "pyproject.toml", project["readme"], *project["license-files"]}
    needed |= {f"{name}.py" for name in PROJECT["tool"]["setuptools"]["py-modules"]}
    for name in PROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*name.split("."))
        needed.add(folder.resolve().relative_to(ROOT).parts[0])
    assert kept == needed
    assert all((ROOT / name).exists() for name in kept)


def test_pods_give_their_volume_to_the_user_of_the_image():
    """Who is not root, so the group of the files must be his."""
    job = KubernetesJob(name="tiny", out="runs/tiny", nodes=1, image="i", claim="c")
    uid = re.search(r"ARG UID=(\d+)", TEXT)[1]
    assert f'"fsGroup": {uid}' in json.dumps(job.manifest(["tiny.py"]))
