"""A search finds the fastest settings that fit, by asking as few as possible, and resumes where it was interrupted."""

import dataclasses
import functools
import itertools
import json
import math
from types import SimpleNamespace

import pytest

from spmd.analysis.memory import Estimate
from spmd.analysis.topology import parse_topology
from spmd.commands import search as command
from spmd.commands.search import run_search
from spmd.errors import ConfigError, Problem
from spmd.run import search
from spmd.run.build import make_setup, planned_mesh
from spmd.run.config import SampleConfig
from spmd.run.load_config import load_config
from spmd.run.search import (
    Candidate,
    Search,
    changed_flags,
    enumerate_settings,
    largest_batch,
    make_search,
    slice_sizes,
    suggest_memory_settings,
)
from spmd.run.step_source import ConfigSource
from spmd.run.step_time import ModelNumbers, count_model
from spmd.sharding.mesh import MeshShape, abstract_mesh

TOPOLOGY = parse_topology("v5e:2x2")
GIB = 2**30


@functools.cache
def counted() -> ModelNumbers:
    config = load_config("demo")
    return count_model(make_setup(config, planned_mesh(config)))


@dataclasses.dataclass
class Ledger:
    """Stands for the estimate of memory: bytes of a config, and what was asked."""

    memory: object
    asked: list = dataclasses.field(default_factory=list)

    def __call__(self, setup, platform):
        self.asked.append(setup.config)
        found = self.memory(setup.config)
        if isinstance(found, Exception):
            raise found
        return Estimate(
            held={}, at_peak={"activations": int(found), "params": 1}, saved={}, host={}
        )


@pytest.fixture
def ledger(monkeypatch):
    """Makes a ledger from config → bytes on a device; nothing is planned or traced."""

    def make(memory) -> Ledger:
        found = Ledger(memory)
        monkeypatch.setattr(search, "estimate_step", found)
        monkeypatch.setattr(
            ConfigSource,
            "on",
            lambda self, mesh, chip="": SimpleNamespace(config=self.config, mesh=mesh),
        )
        monkeypatch.setattr(search, "count_alone", lambda config: counted())
        return found

    return make


def start(folder, *, file="known.json", config=None, **fields) -> Search:
    config = dataclasses.replace(config or load_config("demo"), **fields)
    return make_search(ConfigSource(config), TOPOLOGY, folder / file)


MACHINES = [
    ("demo", "v5e:4x4"),
    ("mixtral-tiny", "v5p:2x2x2"),
    ("demo", "2xv5e:2x2"),
    ("demo", "h100:1x8"),
]


@pytest.mark.parametrize(
    ("name", "topology"), MACHINES, ids=[" ".join(machine) for machine in MACHINES]
)
def test_settings_divide_batch_and_model(name, topology) -> None:
    """The product of a mesh is the machine; it divides batch, heads and experts, and none is there twice."""
    config, machine = load_config(name), parse_topology(topology)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=32))
    model, found = config.model, list(enumerate_settings(config, machine))
    router = getattr(model, "router", None)
    for settings in found:
        mesh, parts = (
            settings["mesh"],
            settings["accumulate"] * max(1, settings["pipeline"].microbatches),
        )
        assert math.prod(mesh.sizes.values()) == machine.devices
        assert settings["slices"] == MeshShape(data=machine.slices)
        assert mesh.data % machine.slices == 0
        assert 32 % (mesh.data * mesh.fsdp * mesh.expert * parts) == 0
        assert model.heads % mesh.tensor == model.kv_heads % mesh.tensor == 0
        assert model.layers >= mesh.pipe
        assert (router.experts if router else 1) % mesh.expert == 0
        assert settings["zero"] in ((1, 3) if mesh.fsdp > 1 else (0,))
        assert mesh.pipe == 1 or parts >= mesh.pipe
    assert len({repr(settings) for settings in found}) == len(found)
    meshes = [settings["mesh"] for settings in found]
    assert {mesh.tensor for mesh in meshes} == {1, 2}
    assert max(mesh.pipe for mesh in meshes) > 1
    assert (max(mesh.expert for mesh in meshes) > 1) == bool(router)


def test_stages_need_not_divide_the_layers() -> None:
    """126 layers are tried on as many stages as published recipes have."""
    found = enumerate_settings(load_config("llama3-405b"), parse_topology("v5p:8x8x8"))
    assert {settings["mesh"].pipe for settings in found} == {1, 2, 4, 8, 16}


def test_all_meshes_are_enumerated() -> None:
    """Of four devices, every product of axes that divides a small model; remat by what its table names."""
    config = load_config("demo")
    found = {
        (s["mesh"].pipe, s["mesh"].data, s["mesh"].fsdp, s["mesh"].tensor)
        for s in enumerate_settings(config, TOPOLOGY)
    }
    sizes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2))
    assert found == {shape for shape in sizes if math.prod(shape) == 4}
    assert {s["remat"] for s in enumerate_settings(config, TOPOLOGY)} == {
        *search.REMATS,
        config.remat,
    }
    bare = dataclasses.replace(config, rules=dataclasses.replace(config.rules, activations=()))
    assert {s["remat"] for s in enumerate_settings(bare, TOPOLOGY)} == {"none", "full"}


BOTH = ("optimizer_state", "params")


def suggested(ledger, fits, **fields):
    """Flags that are suggested for the demo on one chip, where what fits takes half of its memory."""
    ledger(lambda config: (8 if fits(config) else 20) * GIB)
    config = dataclasses.replace(load_config("demo"), **fields)
    mesh = abstract_mesh(MeshShape())
    config = dataclasses.replace(config, mesh=MeshShape(), devices=1)
    setup = make_setup(config, mesh)
    own, found = suggest_memory_settings(ConfigSource(config), setup, parse_topology("v5e:1x1"))
    return [changed_flags(own, c.settings) for c in found.fitting(1) if not c.refused]


def test_settings_that_fit_are_suggested(ledger) -> None:
    """The fastest that fit, in the flags that change; what is set is kept, and none is asked again."""
    full = suggested(ledger, lambda config: config.remat == "full", remat="none")
    assert full == ["--remat full"]
    smaller = suggested(ledger, lambda config: config.accumulate == 4, remat="full")
    assert len(smaller) == 1
    assert "--accumulate 4" in smaller[0]
    both = suggested(
        ledger, lambda config: config.offload == BOTH and config.remat == "full", remat="full"
    )
    assert both == ["--offload optimizer_state params"]
    assert suggested(ledger, lambda config: config.accumulate > 64) == []


def test_settings_of_a_model_without_closed_forms_are_suggested(ledger, monkeypatch) -> None:
    """Its own order ranks them: from the least change on."""

    def uncounted(config):
        raise ConfigError("no", [Problem("model", "does not count its FLOPs")])

    ledger(lambda config: 8 * GIB)
    monkeypatch.setattr(search, "count_alone", uncounted)
    config = dataclasses.replace(
        load_config("demo"), remat="none", offload=(), mesh=MeshShape(), devices=1
    )
    setup = make_setup(config, abstract_mesh(MeshShape()))
    own, found = suggest_memory_settings(ConfigSource(config), setup, parse_topology("v5e:1x1"))
    assert {candidate.seconds for candidate in found.candidates} == {0}
    first = found.candidates[0].settings
    assert changed_flags(own, first) == f"--accumulate {2 * config.accumulate}"


def test_long_sequences_are_split() -> None:
    """Over `sequence`, and only these."""
    config = load_config("demo")
    long = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence=65_536))
    split = [{s["mesh"].sequence for s in enumerate_settings(c, TOPOLOGY)} for c in (config, long)]
    assert split == [{1}, {1, 2, 4}]


def test_the_fastest_that_fits_is_found(tmp_path, ledger) -> None:
    """Candidates are asked from the fastest on; those that do not fit have a reason, and no slower one is asked."""
    asked = ledger(lambda config: 8 * GIB if config.remat == "full" else 20 * GIB).asked
    found = start(tmp_path)
    times = [candidate.seconds for candidate in found.candidates]
    assert times == sorted(times)
    examined = list(found.fitting(2))
    fits = [candidate for candidate in examined if not candidate.refused]
    first = [candidate for candidate in found.candidates if candidate.settings["remat"] == "full"][
        :2
    ]
    assert fits == first
    assert found.best is first[0]
    assert examined[-1] is fits[-1]
    assert len(asked) == len(examined) < len(found.candidates)
    losers = [candidate for candidate in examined if candidate.refused]
    assert losers
    reason = "does not fit: 20 GiB of 15.8 GiB, most of it saved activations"
    assert {candidate.loses(found.best) for candidate in losers} == {reason}
    assert fits[1].loses(fits[0]).endswith(" s")
    assert all(config.devices == 4 for config in asked)


def test_dominated_settings_are_not_asked(tmp_path, ledger) -> None:
    """What is sharded less than settings that do not fit does not either; ZeRO 1 on more devices says nothing of 3."""
    asked = ledger(lambda config: 20 * GIB).asked
    found = start(tmp_path)
    examined = list(found.fitting(1))
    assert found.best is None
    skipped = [c for c in found.candidates if "more than with --" in c.refused]
    assert len(skipped) + len(asked) == len(found.candidates)
    assert len(examined) == len(asked)
    assert {(c.settings["zero"], c.settings["mesh"].fsdp) for c in skipped} == {
        (0, 1),
        (1, 2),
        (1, 4),
        (3, 2),
    }

    def candidate(zero: int, **mesh: int):
        shape = MeshShape(**mesh)
        alike = (
            c for c in found.candidates if (c.settings["mesh"], c.settings["zero"]) == (shape, zero)
        )
        return next(
            c for c in alike if (c.settings["remat"], c.settings["accumulate"]) == ("full", 1)
        )

    narrow, wide = candidate(3, fsdp=2, data=2), candidate(1, fsdp=4)
    assert candidate(3, fsdp=4).holds_less_than(narrow)
    assert candidate(3, fsdp=4).holds_less_than(wide)
    assert wide.holds_less_than(candidate(0, data=4))
    assert not wide.holds_less_than(narrow)
    assert not wide.holds_less_than(wide)
    assert not candidate(3, fsdp=4).holds_less_than(candidate(3, fsdp=2, tensor=2))


def test_an_interrupted_search_resumes(tmp_path, ledger) -> None:
    """What was asked is in the file, and is not asked again; another config or machine asks for itself."""
    memory = lambda config: 20 * GIB if config.remat == "none" else 8 * GIB  # noqa: E731
    first = ledger(memory)
    list(itertools.islice(start(tmp_path).fitting(3), 2))
    assert len(first.asked) == 2
    second = ledger(memory)
    examined = list(start(tmp_path).fitting(3))
    alone = ledger(memory)
    whole = list(start(tmp_path, file="alone.json").fitting(3))
    assert len(second.asked) == len(alone.asked) - 2
    fits = [[(c.flags, c.memory) for c in found if not c.refused] for found in (examined, whole)]
    assert len(fits[0]) == 3
    assert fits[0] == fits[1]
    again = ledger(memory)
    assert start(tmp_path).best == start(tmp_path, file="alone.json").best
    list(start(tmp_path).fitting(3))
    assert again.asked == []
    assert start(tmp_path, seed=7).known == {}
    (tmp_path / "known.json").write_text("{")
    assert start(tmp_path).known == {}


def test_settings_that_cannot_run_are_skipped(tmp_path, ledger) -> None:
    """An error of the setup is a reason; it is saved, too."""
    no = ConfigError("no", [Problem("zero", "cannot be 3 here")])
    asked = ledger(lambda config: no if config.zero == 3 else 8 * GIB).asked
    found = start(tmp_path)
    wrong = [c for c in found.fitting(1) if c.refused]
    assert {c.refused for c in wrong} == {"cannot run: zero: cannot be 3 here"}
    assert found.best is not None
    assert found.best.settings["zero"] != 3
    assert len(asked) == len(wrong) + 1
    list(start(tmp_path).fitting(1))
    assert len(asked) == len(wrong) + 1


def test_a_state_that_is_too_large_is_not_asked(tmp_path, ledger, monkeypatch) -> None:
    """Its arithmetic is enough: 12 bytes of 5 billion parameters fit in four parts, by ZeRO 3, tensors or stages."""
    asked = ledger(lambda config: 8 * GIB).asked
    large = dataclasses.replace(counted(), params=5e9)
    monkeypatch.setattr(search, "count_alone", lambda config: large)
    found = start(tmp_path)
    kept = [c for c in found.candidates if not c.refused and not c.settings["offload"]]
    assert any(
        c.settings["offload"] == ("optimizer_state",) for c in found.candidates if not c.refused
    )
    assert {
        (c.settings["mesh"].fsdp * c.settings["mesh"].tensor * c.settings["mesh"].pipe)
        for c in kept
    } == {4}
    assert {c.settings["zero"] for c in kept if c.settings["mesh"].fsdp == 4} == {3}
    reason = next(c.refused for c in found.candidates if c.settings["mesh"].data == 4 and c.refused)
    assert reason == "does not fit: training state 55.9 GiB of 15.8 GiB"
    assert len(list(found.fitting(1))) == len(asked) == 1


def test_compiled_programs_decide(tmp_path, ledger, monkeypatch) -> None:
    """The fastest program is best; one that the compiler refuses is not, and none is compiled twice."""
    ledger(lambda config: 8 * GIB)
    compiled = []

    def time(config, topology):
        compiled.append(config)
        if len(compiled) == 1:
            raise ConfigError("no", [Problem("topology", "has no room for the step")])
        fits = len(compiled) < 4
        return SimpleNamespace(
            seconds=9.0 - len(compiled), fits=fits, memory=(8 if fits else 20) * GIB
        )

    monkeypatch.setattr(search, "time_compiled_step", time)
    found = start(tmp_path)
    fits = list(found.fitting(4))
    for candidate in (*fits, *fits):
        found.confirm(candidate)
    assert len(compiled) == 4
    # though it is the fastest
    assert fits[3].refused == "does not fit when compiled: 20 GiB of 15.8 GiB"
    assert "the compiler refuses it" in fits[0].refused
    assert "has no room for the step" in fits[0].refused
    assert found.best is fits[2]
    assert (fits[2].seconds, fits[1].seconds) == (6.0, 7.0)
    resumed = start(tmp_path)
    assert resumed.best is not None
    assert (resumed.best.flags, resumed.best.seconds) == (fits[2].flags, 6.0)


def asked_by(folder, *flags: str) -> list[str]:
    return [
        "demo",
        "--topology",
        "v5e:2x2",
        "--confirm",
        "0",
        "--state",
        str(folder / "known.json"),
        *flags,
    ]


def test_the_command_prints_and_writes_the_best(tmp_path, ledger, capsys) -> None:
    """The file is a config with the found settings, whose mesh fits the machine."""
    ledger(lambda config: 8 * GIB if config.remat == "full" else 20 * GIB)
    written = tmp_path / "found.py"
    assert run_search(asked_by(tmp_path, "--write", str(written))) == 0
    best = start(tmp_path).best
    assert best is not None
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [best.flags, f"written to {written}"]
    config = load_config(str(written))
    assert {name: getattr(config, name) for name in best.settings} == dict(best.settings)
    assert config.remat == "full" != load_config("demo").remat
    assert planned_mesh(config).size == 4
    assert config.model == load_config("demo").model
    assert run_search(asked_by(tmp_path, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["flags"] == best.flags
    assert found["best"]["loses"] is None
    assert {e["loses"] is None for e in found["examined"]} == {True, False}


def test_nothing_fits(tmp_path, ledger, capsys) -> None:
    """The nearest is the one with the least memory, and the exit code is 3."""
    ledger(lambda config: (20 if config.remat == "full" else 30) * GIB + config.mesh.fsdp)
    assert run_search(asked_by(tmp_path, "--write", str(tmp_path / "found.py"))) == 3
    out = capsys.readouterr().out
    nearest = start(tmp_path).nearest
    assert nearest is not None
    assert nearest.settings["remat"] == "full"
    assert (
        f"nothing fits v5e:2x2: 15.8 GiB on each device\nnearest: 20 GiB with {nearest.flags}\n"
        in out
    )
    assert not (tmp_path / "found.py").exists()
    assert run_search(asked_by(tmp_path, "--json")) == 3
    assert json.loads(capsys.readouterr().out)["best"] is None


MISTAKES = [
    (["demo"], r"--topology: is not given"),
    (["demo", "--topology", "v5e:2x2", "--confirm", "-1"], r"--confirm: is -1"),
    (
        ["demo", "--topology", "v5e:2x2", "--confirm", "0", "--days", "1", "--largest-batch"],
        r"--days: is another",
    ),
    (["demo", "--topology", "cpu:8"], r"topology: is cpu:8: no speeds are known of cpu"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=["machine", "confirm", "days", "simulated"]
)
def test_mistakes_on_the_command_line(arguments, message) -> None:
    """Are errors by the flag's name."""
    with pytest.raises(ConfigError, match=message):
        run_search(arguments)


def test_a_file_that_cannot_be_written(tmp_path, ledger) -> None:
    """Is an error with the flag."""
    ledger(lambda config: 8 * GIB)
    with pytest.raises(ConfigError, match=r"--write: .* is in no folder that exists"):
        run_search(asked_by(tmp_path, "--write", str(tmp_path / "none" / "found.py")))
    with pytest.raises(ConfigError, match=r"--state: .* only local paths are read and written"):
        run_search([*asked_by(tmp_path), "--state", "s3://bucket/state.json"])


def test_machines_from_the_smallest_on() -> None:
    """Each is twice as large, up to the most chips of a slice; hosts of 8 GPUs."""
    sizes = [str(machine) for machine in slice_sizes(parse_topology("v5e:16x16"))]
    assert sizes == [f"v5e:{s}" for s in ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")]
    for kind, most in (("v5p:4x4x4", 8960), ("v4:4x4x4", 4096)):
        machines = list(slice_sizes(parse_topology(kind)))
        assert [machine.chips for machine in machines] == [4 * 2**n for n in range(len(machines))]
        assert most / 2 < machines[-1].chips <= most
    assert [m.devices for m in slice_sizes(parse_topology("h100:1x8"))][:3] == [8, 16, 32]


def test_the_fewest_chips(tmp_path, ledger, capsys, monkeypatch) -> None:
    """The first machine that is fast enough; without one the exit code is 3, with the largest that was tried."""
    ledger(lambda config: 8 * GIB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "slice_sizes", lambda topology: list(slice_sizes(topology))[:2])
    flags = ["demo", "--topology", "v5e:2x2", "--confirm", "0", "--days"]
    assert run_search([*flags, "1"]) == 0
    assert capsys.readouterr().out.startswith("v5e:2x2: 4 chips: ")
    assert run_search([*flags, "1e-9"]) == 3
    assert capsys.readouterr().out.endswith(
        "no machine of up to 8 chips trains 400 steps in 1e-09 days\n"
    )
    assert run_search([*flags, "1e-9", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"best": None}


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 13])
def test_the_largest_batch(most, ledger) -> None:
    """By bisection: a multiple of what the mesh divides, so large that one more does not fit; 0 if none does."""
    config = dataclasses.replace(
        load_config("demo"), mesh=MeshShape(data=2, fsdp=2), devices=4, accumulate=2
    )
    each = TOPOLOGY.memory // 14
    asked = ledger(lambda config: (config.data.batch // 8 + 13 - most) * each).asked
    batch, memory = largest_batch(config, TOPOLOGY, abstract_mesh(config.mesh))
    assert batch == most * 8
    assert memory == (max(1, most) + 13 - most) * each + 1
    assert all(config.data.batch % 8 == 0 for config in asked)
    assert len(asked) == len({config.data.batch for config in asked}) <= 2 * math.log2(most + 2) + 2


def test_a_search_refuses_what_a_plan_refuses(tmp_path, monkeypatch) -> None:
    """What no layout changes at once; what one does where it is asked for; control: settings that can run."""
    config = dataclasses.replace(load_config("demo"), sample=SampleConfig(prompt="x" * 300))
    with pytest.raises(ConfigError, match="leaves no room for a token"):
        start(tmp_path, config=config)
    with pytest.raises(ConfigError, match="leaves no room for a token"):
        largest_batch(config, TOPOLOGY, abstract_mesh(MeshShape(fsdp=4)))
    monkeypatch.setattr(search, "count_alone", lambda config: counted())
    found = start(tmp_path)
    settings = {
        **found.candidates[0].settings,
        "mesh": MeshShape(fsdp=4),
        "slices": MeshShape(),
        "accumulate": 1,
    }
    for parts, says in ((1, ""), (4, "cannot run: batch: does not divide")):
        candidate = Candidate({**settings, "accumulate": parts}, {})
        found._ask_ledger(candidate)
        assert candidate.refused.startswith(says) if says else not candidate.refused
