"""What XLA is told: every flag is known to the compiler it is for, is shown with its reason, and reaches the step."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from spmd.chips import CHIPS
from spmd.commands.plan import run_plan
from spmd.distributed.initialize import user_xla_flags
from spmd.distributed.xla_flags import (
    CROSSING,
    PRESETS,
    compiler_options,
    flags_for,
)
from spmd.errors import ConfigError
from spmd.run.build import build_flags, make_setup
from spmd.run.describe import flags_text
from spmd.run.load_config import load_config
from spmd.sharding.mesh import MeshShape
from spmd.training.step import make_train_step
from tests import tiny
from tests.programs import run_script

EVERY = {platform: PRESETS[platform] + CROSSING[platform] for platform in PRESETS}
"""Platform → its flags without those of one chip."""


def every(machine):
    """All flags of a machine by its name."""
    chip = parse_topology(machine).chip
    return PRESETS[chip.platform] + chip.flags + CROSSING[chip.platform]


FLAGS_OF_CHIPS = {kind: chip.flags for kind, chip in CHIPS.items()}


@pytest.mark.parametrize("table", [PRESETS, FLAGS_OF_CHIPS, CROSSING])
def test_tables(table):
    """Every platform has an entry; every flag is named once, and has a reason that fits a line."""
    known = set(CHIPS) if table is FLAGS_OF_CHIPS else {"cpu", "tpu", "cuda"}
    assert set(table) == known
    for flags in table.values():
        assert len({flag.name for flag in flags}) == len(flags)
        assert all(20 < len(flag.reason) <= 112 and "\n" not in flag.reason for flag in flags)


def test_quick_leaves_out_what_lengthens_compilation():
    """And nothing else; a later value of such a flag counts."""
    kind = parse_topology("v5e:16x16").chip.device_kind
    preset = flags_for(["preset"], "tpu", kind, crossing=True)
    quick = flags_for(["quick"], "tpu", kind, crossing=True)
    (absent,) = set(preset) - set(quick)
    assert (absent.name, set(quick) - set(preset)) == ("xla_tpu_scoped_vmem_limit_kib", set())
    again = flags_for(["quick", f"{absent.name}=1024"], "tpu", kind, crossing=True)
    assert compiler_options(again)[absent.name] == 1024


def test_gpu_flags_are_known_here():
    """The compiler for CPUs reads the options of GPUs too: it takes them, and refuses one misspelt or mistyped."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(2))
    options = compiler_options(EVERY["cuda"])
    assert options
    lowered.compile(compiler_options=options)
    for name, value in options.items():
        for wrong in ({f"{name}s": value}, {name: "many"}):
            with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
                lowered.compile(compiler_options=wrong)


ABSENT = """
    import json, sys
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from spmd.distributed.initialize import initialize
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.sharding.mesh import MeshShape, mesh_of

    topology = parse_topology(sys.argv[1])
    initialize(target_platform=topology.platform)
    sharding = NamedSharding(mesh_of(MeshShape(fsdp=-1), topology_devices(topology)), P())
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding))
    refused = []
    for number, options in enumerate(json.loads(sys.argv[2])):
        try:
            lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            assert "INVALID_ARGUMENT" in str(error), error
            refused.append(number)
    print(json.dumps(refused))
"""


@pytest.mark.parametrize(
    "topology",
    [
        "v5e:1x1",
        "h100:1x1",
        *(
            pytest.param(topology, marks=pytest.mark.soak)
            for topology in ("v3:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")
        ),
    ],
)
def test_flags_are_known_to_their_own_compiler(topology):
    """A chip's compiler takes every flag and refuses each one misspelt or mistyped; or it is asked for by name."""
    parsed = parse_topology(topology)
    if missing := missing_extra(parsed):
        assert "pip install" in missing.fix
        return
    options = compiler_options(every(topology))
    wrong = [{f"{name}s": value} for name, value in options.items()] + [
        {name: "many"} for name in options
    ]
    assert run_script(ABSENT, topology, json.dumps([options, *wrong])) == list(
        range(1, 1 + len(wrong))
    )


def test_a_config_may_say_otherwise():
    """The last value for a name is taken; without the preset there are XLA's own; a word that is neither is refused."""
    config = load_config("demo")
    one = "xla_gpu_enable_latency_hiding_scheduler"

    def chosen(*asked, platform="gpu", kind=""):
        options = compiler_options(
            build_flags(dataclasses.replace(config, xla=asked), platform, kind)
        )
        return {name: options[name] for name in sorted(options)}

    assert chosen("preset")[one] is True
    assert chosen("preset", f"{one}=false") == {**chosen("preset"), one: False}
    assert chosen("xla_a=1", "xla_b=x", "xla_c=0.5") == {"xla_a": 1, "xla_b": "x", "xla_c": 0.5}
    assert chosen() == chosen("preset", platform="cpu") == {}
    assert chosen(platform="tpu", kind="TPU v5") == {}
    assert (
        len(
            {
                str(chosen("preset", platform="tpu", kind=kind))
                for kind in ("TPU v4", "TPU v5", "TPU v5 lite")
            }
        )
        == 3
    )
    with pytest.raises(ConfigError, match=r'xla: is \'presets\'(.|\n)*did you mean "preset"'):
        dataclasses.replace(config, xla=("presets",))


SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def test_a_flag_of_the_environment_counts_instead_of_the_presets(monkeypatch):
    """The step is compiled with the user's value, and the text says so; without the variable, with the preset's."""
    config = load_config("demo")
    (preset,) = build_flags(config, "cuda", "")
    assert (preset.name, preset.value) == (SCHEDULER, True)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_ftz --{SCHEDULER}=false")
    flags = build_flags(config, "cuda", "")
    assert compiler_options(flags) == {SCHEDULER: False}
    assert f"set in the environment; the preset has {SCHEDULER}=true" in flags_text(flags, "cuda")
    monkeypatch.delenv("XLA_FLAGS")
    tpu = "xla_tpu_enable_latency_hiding_scheduler"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{tpu}=false")
    assert compiler_options(build_flags(config, "tpu", "TPU v4"))[tpu] is False
    assert build_flags(config, "cuda", "") == (preset,)


def test_config_and_environment_may_not_contradict_each_other(monkeypatch):
    """Two values of one flag are refused with both; equal ones are not."""
    config = dataclasses.replace(load_config("demo"), xla=("preset", f"{SCHEDULER}=true"))
    monkeypatch.setenv("XLA_FLAGS", f"--{SCHEDULER}=false")
    with pytest.raises(ConfigError, match=f"{SCHEDULER}=true, and the environment .*=false"):
        build_flags(config, "cuda", "")
    monkeypatch.setenv("XLA_FLAGS", f"--{SCHEDULER}")
    assert compiler_options(build_flags(config, "cuda", "")) == {SCHEDULER: True}


def test_flags_of_the_environment_are_read_as_xla_reads_them(monkeypatch, tmp_path):
    """A name without a value is true, a file has flags, and what spmd itself adds is no choice of the user."""
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_b")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert user_xla_flags() == {"xla_a": "1", "xla_b": "true"}
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "absent"))
    assert user_xla_flags() == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_a=1")
    assert user_xla_flags() == {"xla_a": "1"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    assert user_xla_flags() == {"xla_gpu_autotune_level": "2"}


def test_what_is_added_on_slow_networks():
    """Crossing axes add their flags, and without them those are not there."""
    for platform, added in CROSSING.items():
        without, crossing = (
            flags_for(["preset"], platform, crossing=crossing) for crossing in (False, True)
        )
        assert set(crossing) - set(without) == set(added)
        assert not set(without) & set(added)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"xla_no_such_flag": True}, "xla_no_such_flag"),
        ({"xla_cpu_ftz": "many"}, "xla_cpu_ftz"),
    ],
)
def test_the_step_is_compiled_with_the_options(options, name):
    """A step that has a wrong option names it, before it compiles."""
    batch = {
        n: jax.ShapeDtypeStruct((8, 16), d) for n, d in (("tokens", "int32"), ("targets", "int32"))
    }
    batch["weights"] = jax.ShapeDtypeStruct((8, 16), "float32")
    plan, loss_fn = tiny.plan(fsdp=2), tiny.loss_fn()
    step = make_train_step(plan, loss_fn, compiler_options=options)
    with pytest.raises(ConfigError, match=name):
        step.compile(batch)


def test_the_recipe_gives_its_flags_to_the_step():
    """The step on devices has the flags of their platform, those of the config among them."""
    config = dataclasses.replace(
        load_config("demo"), xla=("preset", "xla_cpu_enable_fast_math=false")
    )
    mesh = tiny.mesh(**{axis: size for axis, size in config.mesh.sizes.items() if size > 1})
    assert make_setup(config, mesh).step.compiler_options == {"xla_cpu_enable_fast_math": False}
    assert (
        make_setup(dataclasses.replace(config, xla=("preset",)), mesh).step.compiler_options == {}
    )


PLAN = ["demo", "--mesh.data", "2", "--mesh.fsdp", "4", "--mesh.tensor", "1", "--slices.data", "2"]


@pytest.mark.parametrize(
    ("topology", "platform"),
    [("2xv5e:2x2", "tpu"), ("2xv5p:2x2x1", "tpu"), ("h100:2x4", "cuda"), ("cpu:8", "cpu")],
)
def test_the_plan_shows_them(topology, platform, capsys):
    """Each flag with its value and its reason, and what must be exported, within 120 columns; in JSON too."""
    assert run_plan([*PLAN, "--topology", topology]) == 0
    printed = capsys.readouterr().out
    shown = printed.partition("flags for XLA")[2].partition("memory of one device")[0]
    assert all(len(line) <= 120 for line in shown.splitlines())
    for flag in every(topology):
        assert f"  {flag}\n      {flag.reason}\n" in printed
    assert ("flags for XLA" in printed) == bool(every(topology))
    others = {flag.name for name, flags in EVERY.items() if name != platform for flag in flags}
    assert not any(name in printed for name in others)
    assert run_plan([*PLAN, "--topology", topology, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["xla"]
    assert written["flags"] == [dataclasses.asdict(flag) for flag in every(topology)]


def test_one_slice_shows_nothing_of_slow_networks(capsys):
    """The control: without `slices`, the flags for crossing axes are not in the plan."""
    config = dataclasses.replace(load_config("demo"), mesh=MeshShape(fsdp=8))
    for platform in ("tpu", "cuda"):
        text = flags_text(build_flags(config, platform, ""), platform)
        assert all(flag.name in text for flag in PRESETS[platform])
        assert not any(flag.name in text for flag in CROSSING[platform])
