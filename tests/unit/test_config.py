"""A config is a value: it goes to JSON and back, its changes are named, and what cannot be used is refused at once."""

import dataclasses
import json
import sys
from typing import get_args, get_type_hints

import pytest

import spmd
from spmd.commands.parsing import parse_command
from spmd.commands.plan import PlanCommand
from spmd.distributed.initialize import initialize
from spmd.errors import CheckpointError, ConfigError, MeshError
from spmd.model_interface.attention_config import KERNELS, Kernel
from spmd.model_interface.model_config import (
    experts_of,
    heads_of,
    layers_of,
    router_of,
    windows_of,
)
from spmd.models.decoder import DecoderConfig
from spmd.models.deepseek import PRESETS as DEEPSEEKS
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.optim.config import describe_schedule, make_learning_rate
from spmd.parity.bugs import BUGS, Bug
from spmd.partition_rules.llama import LLAMA
from spmd.precision import POLICIES, canonical_precision
from spmd.run.config import config_difference, config_values, with_values
from spmd.run.load_config import load_config, other_config, shipped
from spmd.run.record import changed_fields
from spmd.run.run_dir import RunDir
from spmd.sharding.optimizer_state import ZERO_KEEPS, ZeroStage
from tests import tiny

CONFIG = spmd.TrainConfig(model=tiny.CONFIG, rules=LLAMA)


def wrong(error=ConfigError, **fields):
    """The places of all problems of a config with these fields."""
    with pytest.raises(error) as caught:
        dataclasses.replace(CONFIG, **fields)
    assert all(problem.fix for problem in caught.value.problems)
    return [problem.where for problem in caught.value.problems]


def test_other_names_of_precisions_are_recorded_by_the_canonical_one():
    """In Python, on the command line, and in a record of a run."""
    for name, canonical in (("bfloat16", "bf16"), ("float16", "fp16"), ("fp32", "float32")):
        config = dataclasses.replace(CONFIG, precision=name)
        assert config_values(config)["precision"] == config.precision == canonical
        parsed, _ = parse_command(PlanCommand, ["demo", "--precision", name], "plan")
        assert parsed.config.precision == canonical
    assert wrong(precision="bfloat") == ["precision"]


def test_fewer_steps_on_the_command_line_shorten_the_warmup(tmp_path):
    """It keeps its share where it no longer fits, and the plan says what it is.

    What fits stays, and so do a warmup that a flag gives and a config that contradicts itself.
    """

    def optimizer(config, *flags):
        parsed, _ = parse_command(PlanCommand, [config, *flags], "plan")
        return parsed.config.optimizer

    own = load_config("demo").optimizer
    assert optimizer("demo", "--steps", "20") == dataclasses.replace(own, warmup_steps=1)
    assert optimizer("demo", "--steps", "1").warmup_steps == 0
    assert optimizer("demo", "--steps", "100") == own
    wsd = ("--optimizer.schedule", "wsd", "--optimizer.decay-fraction", "0.9")
    for steps in range(1, 30):
        shorter = optimizer("demo", "--steps", str(steps), *wsd)
        make_learning_rate(shorter, steps)
    assert describe_schedule(optimizer("demo", "--steps", "20"), 20) == (
        "learning rate 0.002, cosine: warmup of 1 of 20 steps, decay over the last 19 to 0.0002"
    )
    given = optimizer("demo", "--steps", "20", "--optimizer.warmup-steps", "30")
    path = tmp_path / "wrong.py"
    path.write_text(
        "import dataclasses\nfrom spmd.examples.demo import config\n"
        "config = dataclasses.replace(config, steps=20)\n"
    )
    for wrong in (given, optimizer(str(path)), optimizer(str(path), "--steps", "10")):
        with pytest.raises(ConfigError, match="too few for warmup and decay"):
            make_learning_rate(wrong, 20)


def test_the_shipped_configs_are_those_of_the_readme():
    """By name, and no example that is not a config."""
    assert set(shipped()) >= {
        "demo",
        "tinyllama-1b",
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
        "mixtral-tiny",
        "mixtral-8x7b",
        "deepseek-v3",
    }
    assert "__init__" not in shipped()


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_shipped_config_goes_to_json_and_back(name):
    """What is written beside a run gives the config again, whatever config the values are laid over."""
    config = load_config(name)
    values = json.loads(json.dumps(config_values(config)))
    assert "rules" not in values
    assert values.keys() | {"rules"} == {field.name for field in dataclasses.fields(config)}
    assert with_values(config, values) == config
    other = dataclasses.replace(
        config,
        steps=7,
        seed=9,
        out="elsewhere",
        mesh=spmd.MeshShape(data=3),
        data=spmd.DataConfig(source=("x", "y")),
    )
    assert other != config
    assert with_values(other, values) == config
    assert config_difference(values, config_values(with_values(other, values))) == {}


def test_configs_differ_from_one_another():
    """The round trip above compares configs that are not all equal."""
    values = [config_values(load_config(name)) for name in shipped()]
    assert len({json.dumps(v, sort_keys=True) for v in values}) == len(values)


def test_values_that_are_not_given_stay():
    """A partial table changes what it names, however deep, and turns lists back into tuples."""
    changed = with_values(
        CONFIG, {"data": {"batch": 3, "source": ["a", "b"]}, "model": {"d_ff": 96}, "zero": 1}
    )
    assert changed == dataclasses.replace(
        CONFIG,
        data=dataclasses.replace(CONFIG.data, batch=3, source=("a", "b")),
        model=tiny.replaced(d_ff=96),
        zero=1,
    )
    assert with_values(CONFIG, {}) == CONFIG


def test_values_are_validated_like_fields():
    """A config file by hand cannot bring in what the constructor refuses."""
    with pytest.raises(ConfigError, match="steps: is 0"):
        with_values(CONFIG, {"steps": 0})


def test_a_difference_names_the_dotted_path_and_both_values():
    """Nothing else is in it, and it has a direction."""
    changed = with_values(
        CONFIG, {"steps": 5, "optimizer": {"learning_rate": 0.5}, "data": {"source": ["corpus"]}}
    )
    before, after = config_values(CONFIG), config_values(changed)
    assert config_difference(before, after) == {
        "steps": [CONFIG.steps, 5],
        "optimizer.learning_rate": [CONFIG.optimizer.learning_rate, 0.5],
        "data.source": [list(CONFIG.data.source), ["corpus"]],
    }
    assert config_difference(after, before) == {
        k: v[::-1] for k, v in config_difference(before, after).items()
    }
    assert config_difference(before, before) == {}


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({"a": 1}, {}, {"a": [1, None]}),
        ({}, {"b": 2}, {"b": [None, 2]}),
        ({"a": {"x": 1}}, {"a": 3}, {"a": [{"x": 1}, 3]}),
        ({"a": {"x": {"y": 1, "z": 2}}}, {"a": {"x": {"y": 1, "z": 3}}}, {"a.x.z": [2, 3]}),
    ],
)
def test_a_difference_shows_fields_that_one_side_lacks(before, after, difference):
    """A run of an older version has other fields."""
    assert config_difference(before, after) == difference


def test_all_fields_that_cannot_be_used_are_listed_at_once():
    """One error for nine fields."""
    fields = {
        "steps": 0,
        "accumulate": 0,
        "log_every": 0,
        "checkpoint_every": -1,
        "max_to_keep": 0,
        "keep_best": -1,
        "devices": -8,
        "seed": -1,
    }
    assert wrong(**fields, remat="ful") == sorted([*fields, "remat"])


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"accumulate": 3, "data": spmd.DataConfig(batch=8)}, ["accumulate"]),
        ({"accumulate": 0}, ["accumulate"]),
        ({"evaluate": {"tokens": 0, "every": -1}}, ["evaluate.every", "evaluate.tokens"]),
        (
            {"sample": {"tokens": -1, "temperature": -0.1, "top_k": -1, "top_p": 0.0}},
            ["sample.temperature", "sample.tokens", "sample.top_k", "sample.top_p"],
        ),
        ({"zero": 4}, ["zero"]),
        ({"on_nan": "ignore"}, ["on_nan"]),
    ],
    ids=str,
)
def test_each_field_has_its_range(fields, places):
    """Also those of the parts that have no check of their own."""
    parts = {"evaluate": spmd.EvaluationConfig, "sample": spmd.SampleConfig}
    assert (
        wrong(**{k: parts[k](**v) if isinstance(v, dict) else v for k, v in fields.items()})
        == places
    )


def test_the_smallest_values_are_accepted():
    """The ranges above begin where they say."""
    least = {
        "steps": 1,
        "accumulate": 1,
        "log_every": 1,
        "checkpoint_every": 0,
        "max_to_keep": 1,
        "keep_best": 0,
        "seed": 0,
    }
    assert dataclasses.replace(CONFIG, **least, devices=0).steps == 1


def test_a_config_is_frozen_and_equal_by_value():
    """Nothing changes a run's config behind its back."""
    assert dataclasses.replace(CONFIG) == CONFIG
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.steps = 3


SOURCE = "import spmd\nfrom spmd.models.llama import PRESETS\nfrom spmd.partition_rules.llama import LLAMA\n"


def test_a_config_file_is_loaded_by_path(tmp_path):
    """The value named `config` in it."""
    path = tmp_path / "mine.py"
    path.write_text(
        SOURCE + 'config = spmd.TrainConfig(model=PRESETS["test"], rules=LLAMA, steps=3)\n'
    )
    assert load_config(str(path)) == dataclasses.replace(CONFIG, steps=3)


@pytest.mark.parametrize("name", ["dmo", "/no/such/config.py", "demo.py", ".", ""])
def test_a_config_that_is_not_there_is_an_error(name):
    """A wrong name, a wrong path, a folder, nothing."""
    with pytest.raises(ConfigError, match="Config not found"):
        load_config(name)


@pytest.mark.parametrize(
    ("text", "error", "complaint"),
    [
        ("", ConfigError, "defines no config"),
        ("config = 1", ConfigError, "defines config = 1"),
        ("x = 1\nconfig = (", ConfigError, r"broken\.py:2: is not Python"),
        ("import nothing_of_this_name", ConfigError, "No module named"),
        (
            SOURCE + "config = spmd.TrainConfig(model=PRESETS['test'], rules=LLAMA, stps=3)",
            ConfigError,
            "stps",
        ),
        (
            SOURCE + "config = spmd.TrainConfig(model=PRESETS['tset'], rules=LLAMA)",
            ConfigError,
            "tset",
        ),
        (
            SOURCE + "config = spmd.TrainConfig(model=PRESET['test'], rules=LLAMA)",
            ConfigError,
            "PRESET",
        ),
        (
            SOURCE + "config = spmd.TranConfig(model=PRESETS['test'], rules=LLAMA)",
            ConfigError,
            "TranConfig",
        ),
        (
            SOURCE + "config = spmd.TrainConfig(model=PRESETS['test'], rules=LLAMA, steps=0)",
            ConfigError,
            "steps: is 0",
        ),
        (SOURCE + "spmd.MeshShape(data=0)", MeshError, "data: is 0"),
    ],
)
def test_a_config_that_cannot_be_read_is_an_error(text, error, complaint, tmp_path):
    """A broken file is named with its reason; our own errors in it come through as they are."""
    path = tmp_path / "broken.py"
    path.write_text(text + "\n")
    with pytest.raises(error, match=complaint):
        load_config(str(path))


MODEL = "DecoderConfig(vocab=256, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64)"
HEAD = "import dataclasses\nimport spmd\nfrom spmd.models.decoder import DecoderConfig\n"
HEAD += "from spmd.partition_rules.llama import LLAMA\n"


def write(path, text, model=MODEL):
    """A config file that begins with `text`."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{HEAD}{text}\nconfig = spmd.TrainConfig(model={model}, rules=LLAMA)\n")
    return path


@pytest.fixture
def imports():
    """What imports find is as it was afterwards."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("class Odd(Exception): pass\nraise Odd('strange')", r"broken\.py:6: fails: Odd: strange"),
        ("import sys; sys.exit('bye')", r"broken\.py:5: fails: SystemExit: bye"),
        ("assert 1 == 2", r"broken\.py:5: fails: AssertionError"),
        ("def f():\n    return f()\nf()", r"broken\.py:6: fails: RecursionError"),
        ("raise GeneratorExit", r"broken\.py:5: fails: GeneratorExit"),
        (
            "raise ExceptionGroup('two', [ValueError('a')])",
            r"broken\.py:5: fails: ExceptionGroup: two",
        ),
    ],
)
def test_an_exception_of_a_config_is_two_lines(raised, said, tmp_path, imports):
    """Whatever it raises: file and line, type, message."""
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(str(write(tmp_path / "broken.py", raised)))
    assert str(caught.value).count("\n") == 1


def test_ctrl_c_in_a_config_is_ctrl_c(tmp_path, imports):
    """It is no failure of the file."""
    with pytest.raises(KeyboardInterrupt):
        load_config(str(write(tmp_path / "mine.py", "raise KeyboardInterrupt")))


def test_a_class_of_a_config_has_flags(tmp_path, imports):
    """A subclass of a model's config, in the file or in the one beside it, resolves its annotations and docstrings."""
    own = "@dataclasses.dataclass(frozen=True)\nclass Mine(DecoderConfig):\n    extra: 'int | None' = 3\n"
    model = MODEL.replace("DecoderConfig", "Mine")
    inside = write(tmp_path / "inside.py", own, model)
    (tmp_path / "beside.py").write_text(HEAD + own)
    outside = write(tmp_path / "outside.py", "from beside import Mine", model)
    for path in (inside, outside):
        parsed, source = parse_command(PlanCommand, [str(path), "--model.extra", "7"], "plan")
        assert (parsed.config.model.extra, source) == (7, path)


def test_two_configs_with_equal_named_modules_do_not_mix(tmp_path, imports):
    """Each finds the module beside itself, also one that it imports later; the standard library is not hidden."""
    configs = {}
    for width in (16, 32):
        folder = tmp_path / str(width)
        text = "from beside import WIDTH\nimport json\ndef later():\n    import later_on\n    return later_on.WIDTH\n"
        configs[width] = write(folder / "mine.py", text, MODEL.replace("32", "WIDTH"))
        (folder / "beside.py").write_text(f"WIDTH = {width}\n")
        (folder / "later_on.py").write_text(f"WIDTH = {width}\n")
        (folder / "json.py").write_text("raise ValueError\n")
        (folder / "jaxtyping").mkdir()  # a plain folder does not hide a package
    assert load_config(str(configs[16])).model.d_model == 16
    with other_config():
        assert load_config(str(configs[32])).model.d_model == 32
        assert sys.modules["beside"].WIDTH == 32
    assert sys.modules["beside"].WIDTH == 16
    assert vars(sys.modules[f"config {configs[16]}"])["later"]() == 16
    assert load_config(str(configs[32])).model.d_model == 32
    assert sys.modules[f"config {configs[32]}"].later() == 32


def test_a_run_folder_gets_what_its_config_imports(tmp_path, imports):
    """Modules and packages beside the config are copied, other files are not; and the copy loads by itself."""
    source = write(
        tmp_path / "mine" / "mine.py", "import parts.widths\nfrom beside import WIDTH", MODEL
    )
    (source.parent / "parts").mkdir()
    (source.parent / "parts" / "widths.py").write_text("WIDE = 64\n")
    (source.parent / "beside.py").write_text("from parts.widths import WIDE\nWIDTH = 32\n")
    (source.parent / "unused.py").write_text("")
    run = RunDir(tmp_path / "run")
    run.describe(load_config(str(source)), source, "plan")
    names = sorted(path.relative_to(run.path).as_posix() for path in run.path.rglob("*.py"))
    assert names == ["beside.py", "config.py", "parts/widths.py"]
    source.with_name("beside.py").unlink()
    assert run.config().model.d_model == 32
    assert sys.modules["beside"].__file__ == str(run.path / "beside.py")


def test_a_run_folder_of_another_version_is_refused(tmp_path):
    """Each field that there is no more is named; without it, the folder is read."""
    source = write(tmp_path / "mine.py", "WIDTH = 32", MODEL)
    run = RunDir(tmp_path / "run")
    run.describe(load_config(str(source)), source, "plan")
    assert run.config().model.d_model == 32
    record = run.path / "config.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({"config": values["config"] | {"keep": 3}}))
    with pytest.raises(CheckpointError, match=r"config\.json: keep: is no field"):
        run.config()


def test_a_module_named_config_is_refused(tmp_path, imports):
    """It would be lost in the run folder, which has a config.py."""
    (tmp_path / "config.py").write_text("")
    with pytest.raises(ConfigError, match="module named config"):
        load_config(str(write(tmp_path / "mine.py", "import config as other")))


@dataclasses.dataclass
class Partial:
    """A model's config that lacks most of its interface."""

    vocab: int = 256


class Undecorated(DecoderConfig):
    """A subclass whose field is none."""

    extra: int = 3


class NoDataclass:
    """All of the interface, and no fields."""

    vocab = 1

    def build(self, rngs):
        """Build nothing."""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Partial(), ["Partial has no build"]),
        (None, ["NoneType has no vocab, build", "is no dataclass instance"]),
        (
            Undecorated(**vars(tiny.CONFIG)),
            ["is no dataclass itself, so extra cannot be set"],
        ),
        (NoDataclass(), ["NoDataclass is no dataclass instance"]),
        (DecoderConfig, ["DecoderConfig'> is no dataclass instance"]),
    ],
    ids=["partial", "none", "undecorated", "no dataclass", "class"],
)
def test_a_model_that_lacks_something_is_refused(model, said):
    """With all that is missing."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(CONFIG, model=model)
    found = [problem.what for problem in caught.value.problems]
    assert [part for part in said if not any(part in what for what in found)] == []


def test_a_model_without_optional_numbers_counts_as_one_of_each():
    """One layer, head and expert, and no windows; the control: those of a config that says them."""

    def numbers(config):
        return heads_of(config), layers_of(config), experts_of(config), windows_of(config)

    assert numbers(NoDataclass()) == ((1, 1), 1, 1, (0,))
    model = MIXTRALS["mixtral-8x7b"]
    assert numbers(model) == ((32, 8), 32, 8, (model.window,))
    assert router_of(NoDataclass()) is None
    assert router_of(model) is model.router


def test_the_names_of_flags_are_those_of_their_tables():
    """In their order; the control: float64 is a policy, and no flag of a language model."""
    assert get_args(Bug) == tuple(BUGS)
    assert get_args(Kernel) == tuple(KERNELS)
    assert get_args(ZeroStage) == tuple(ZERO_KEEPS)
    names = get_args(get_type_hints(spmd.TrainConfig)["precision"])
    policies = set(map(canonical_precision, names))
    assert set(POLICIES) - policies == {"float64"}
    assert policies <= set(POLICIES)


@pytest.mark.parametrize("number", [2**31, 99999999999999999999])
def test_numbers_that_jax_cannot_hold_are_refused(number):
    """Of every part of a config, at once; the largest 32-bit integer is accepted."""
    model, data = tiny.replaced(layers=number), spmd.DataConfig(batch=number)
    assert wrong(steps=number, model=model, data=data, mesh=spmd.MeshShape(data=number)) == [
        *("data.batch", "mesh.data", "model.layers", "steps")
    ]
    assert dataclasses.replace(CONFIG, steps=2**31 - 1).steps == 2**31 - 1


def test_a_launch_of_too_many_devices_is_refused():
    """Each simulated device has threads; a million of them never start."""
    with pytest.raises(ConfigError, match="at most 1024"):
        initialize(1_000_000)


def test_a_run_with_a_mixer_of_another_class_can_be_resumed():
    """Fields that a record lacks have the defaults of the recorded class; the control has another rank."""
    model = DEEPSEEKS["test-deepseek"]
    config = dataclasses.replace(CONFIG, model=model)
    record = {"config": config_values(config), "model": "DecoderConfig"}
    assert changed_fields(record, config) == {}
    mixer = dataclasses.replace(model.layer.mixer, kv_rank=4)
    other = dataclasses.replace(model, layer=dataclasses.replace(model.layer, mixer=mixer))
    changed = changed_fields(record, dataclasses.replace(config, model=other))
    assert changed == {"model.layer.mixer.kv_rank": [8, 4]}
