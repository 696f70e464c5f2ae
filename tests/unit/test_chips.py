"""A kind of chip is one entry, all that a new chip needs, with figures that can be right together."""

import dataclasses

import pytest

import spmd
from spmd.analysis.topology import Topology, example_machines, parse_topology
from spmd.chips import (
    CHIPS,
    Chip,
    ClosedRates,
    Flag,
    Hardware,
    Rates,
    SmallGathers,
    chip_of,
    peak_flops,
)
from spmd.errors import ConfigError
from spmd.layers.expert_exchange import DenseAllToAll, RaggedAllToAll, expert_axes
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import build_flags, make_setup, planned_mesh
from spmd.run.describe import flags_text
from spmd.run.load_config import load_config
from spmd.run.recipes import recipe_problems
from spmd.run.search import slice_sizes
from spmd.run.step_time import estimate_time
from spmd.settings.quantize import RECIPES
from spmd.sharding.mesh import MeshShape, abstract_mesh, chip_of_mesh, is_tpu
from spmd.step_time.hardware import closed_rates, compiled_rates, hardware_of
from tests import tiny

NEW = Chip(
    kind="v9",
    platform="tpu",
    device_kind="TPU v9",
    example="8x8",
    memory=2**36,
    dims=2,
    max_chips=1024,
    ring=32,
    clock=2e9,
    speeds=Hardware(
        peak=4e15, memory_bandwidth=8e12, link=2e11, network=2e10, host=6e10, matrix_unit=256
    ),
    closed=ClosedRates(spread=0.3),
    compiled=Rates(spread=0.3),
    flags=(Flag("xla_tpu_new", True, "what only this compiler knows"),),
    small_gathers=SmallGathers(devices=8, size=2**20),
    ragged_devices=32,
    reads_transposed=True,
)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Chip:
    """Add the entry of a chip that does not exist."""
    monkeypatch.setitem(CHIPS, NEW.kind, NEW)
    return NEW


def test_a_new_chip_is_a_machine(new: Chip) -> None:
    """Its shape, the links that wrap around and the most chips are its entry's; messages have its example."""
    machine = parse_topology("v9:16x32")
    assert (machine.devices, machine.hosts, machine.memory) == (512, 128, 2**36)
    assert machine.wrap == (False, True, False)
    assert "v9:8x8" in example_machines()
    assert max(topology.chips for topology in slice_sizes(machine)) == 1024
    with pytest.raises(Exception, match="32 × 64 = 2048 > 1024"):
        parse_topology("v9:32x64")


@pytest.mark.parametrize("ring", [0, 16])
def test_links_wrap_around_where_the_entry_says(ring: int) -> None:
    """A chip without a ring has none; control: one with a ring of its dimension."""
    machine = Topology("v9:16x2", dataclasses.replace(NEW, ring=ring), (16, 2))
    assert machine.wrap == (ring == 16, False, False)


def test_a_new_chip_is_planned_and_timed(new: Chip) -> None:
    """The plan has its flag and its reason, and the prediction its speeds, rates and spread."""
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=32, batch=8)
    model = DecoderConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64)
    config = spmd.TrainConfig(model=model, rules=LLAMA, data=data, mesh=MeshShape(fsdp=8))
    built = make_setup(config, planned_mesh(config), new.device_kind)
    shown = flags_text(build_flags(config, new.platform, new.device_kind), new.platform)
    assert "xla_tpu_new=true\n      what only this compiler knows" in shown
    found = estimate_time(built, parse_topology("v9:2x4"))
    assert found.hardware is new.speeds
    assert found.range[1] == pytest.approx(found.seconds * (1 + 0.3))
    half = dataclasses.replace(NEW.speeds, memory_bandwidth=4e12)
    CHIPS["v9"] = dataclasses.replace(new, speeds=half)
    slower = estimate_time(built, parse_topology("v9:2x4"))
    assert slower.spent["memory-bound work"] == 2 * found.spent["memory-bound work"]


def test_a_new_chip_has_its_flags_and_its_peak(new: Chip) -> None:
    """By the kind that JAX names; control: without the entry there are neither."""
    config = dataclasses.replace(load_config("demo"), xla=("preset",))
    names = {flag.name for flag in build_flags(config, "tpu", "TPU v9")}
    assert "xla_tpu_new" in names
    assert peak_flops("TPU v9") == 4e15
    del CHIPS["v9"]
    assert names - {flag.name for flag in build_flags(config, "tpu", "TPU v9")} == {"xla_tpu_new"}
    assert peak_flops("TPU v9") is None
    CHIPS["v9"] = new


@pytest.mark.parametrize(
    ("fsdp", "exchange"), [(4, RaggedAllToAll), (8, DenseAllToAll)], ids=["at-the-limit", "above"]
)
def test_a_new_chip_has_its_quirks(fsdp: int, exchange: type, new: Chip) -> None:
    """Experts are exchanged as its links allow."""
    mesh = abstract_mesh(MeshShape(fsdp=fsdp, expert=8))
    assert expert_axes(mesh, ("expert",), ("tpu", "TPU v9")).kind is exchange


def test_a_new_gpu_has_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 and float8 are refused where its entry has none."""
    gpu = dataclasses.replace(CHIPS["b200"], kind="c300", device_kind="NVIDIA C300")
    recipes = [RECIPES["mxfp8"]]
    for chip, problems in ((gpu, 0), (dataclasses.replace(gpu, blocks_of_32=False), 1)):
        monkeypatch.setitem(CHIPS, "c300", chip)
        assert len(recipe_problems(recipes, "NVIDIA C300")) == problems


def test_what_is_not_known_is_said() -> None:
    """Speeds, and rates of either prediction; control: with them there is no error."""
    machine = Topology("v9:8x8", NEW, (8, 8))
    found = (hardware_of(machine), closed_rates(machine), compiled_rates(machine))
    assert found == (NEW.speeds, NEW.closed, NEW.compiled)
    unknown = Topology("v9:8x8", Chip(kind="v9", platform="tpu", device_kind="TPU v9"), (8, 8))
    for ask, what in (
        (hardware_of, "speeds"),
        (closed_rates, "rates"),
        (compiled_rates, "rates of compiled programs"),
    ):
        with pytest.raises(ConfigError, match=f"no {what} are known of v9"):
            ask(unknown)


def test_devices_have_one_chip() -> None:
    """Each kind of device is that of one entry, under its own key; an unknown one has no facts."""
    kinds = [chip.device_kind for chip in CHIPS.values()]
    assert len(set(kinds)) == len(kinds)
    for kind, chip in CHIPS.items():
        assert chip.kind == kind
        assert chip_of(chip.device_kind) is chip
    assert chip_of("TPU v1") == Chip(kind="", platform="", device_kind="TPU v1")


def test_meshes_have_one_chip() -> None:
    """That of their devices; an abstract mesh has none."""
    mesh = tiny.mesh(fsdp=8)
    assert chip_of_mesh(mesh) is CHIPS["cpu"]
    assert not is_tpu(mesh)
    for absent in (None, abstract_mesh(MeshShape(fsdp=8))):
        assert chip_of_mesh(absent).kind == ""
        assert not is_tpu(absent)


def implausible(chip: Chip) -> list[str]:
    """Fields of an entry that cannot be right together."""
    is_tpu_chip, speeds = chip.platform == "tpu", chip.speeds
    checks = {
        "platform": chip.platform in ("tpu", "cuda", "rocm", "cpu"),
        "example": bool(chip.example),
        "torus": (chip.dims in (2, 3)) == bool(chip.max_chips) == bool(chip.ring) == is_tpu_chip,
        "compiler": bool(chip.clock) == is_tpu_chip and bool(chip.gpu) == (chip.platform == "cuda"),
        "rates": (chip.closed is None) == (speeds is None),
        "compiled": (chip.compiled is not None) == is_tpu_chip,
        "kin": chip.rates_of in ("", *CHIPS) and chip.rates_of != chip.kind,
        "links": not (chip.pcie and chip.joined) and bool(chip.cloud) in (is_tpu_chip, False),
        "quirks": is_tpu_chip or not (chip.flags or chip.small_gathers or chip.ragged_devices),
    }
    spreads = [rates.spread for rates in (chip.closed, chip.compiled) if rates is not None]
    checks["spread"] = all(0.05 <= spread < 0.5 for spread in spreads)
    if speeds is not None:
        checks["memory"] = chip.memory is not None and 8e9 < chip.memory < 1e12
        checks["bandwidths"] = speeds.memory_bandwidth > speeds.link > speeds.network
        checks["host"] = speeds.memory_bandwidth > speeds.host > 1e9
        checks["intensity"] = 60 < speeds.peak / speeds.memory_bandwidth < 1000
        checks["latencies"] = 0 < speeds.latency < speeds.network_latency < 1e-3
        checks["matrix unit"] = (speeds.matrix_unit in (128, 256)) == is_tpu_chip
        checks["pcie"] = not chip.pcie or speeds.link == speeds.host
        checks["products"] = set(speeds.products) <= {"int8", "float8"}
        checks["times"] = all(0.2 < time < 1.3 for time in speeds.products.values())
        checks["formats"] = not chip.blocks_of_32 or "float8" in speeds.products
    return [name for name, holds in checks.items() if not holds]


@pytest.mark.parametrize("kind", CHIPS)
def test_figures_are_plausible(kind: str) -> None:
    """Memory is faster than links, links than the network; a TPU has a torus and a clock, a GPU neither."""
    assert implausible(CHIPS[kind]) == []


def test_control_implausible_figures() -> None:
    """Two speeds in the wrong places, a figure in another unit and a GPU's torus are found."""
    speeds = CHIPS["h100"].speeds
    assert speeds is not None
    swapped = dataclasses.replace(speeds, link=speeds.network, network=speeds.link)
    assert implausible(dataclasses.replace(CHIPS["h100"], speeds=swapped)) == ["bandwidths"]
    in_gib = dataclasses.replace(CHIPS["h100"], memory=80)
    assert implausible(in_gib) == ["memory"]
    assert implausible(dataclasses.replace(CHIPS["h100"], dims=3)) == ["torus"]
