"""Deliberate bugs in the library, each of which the tests that every change must pass notice.

Each is one substitution in a copy of the repository, and a few tests that are run there, with the
copy's package. A substitution that does not apply any more is an error: write it anew for the code
as it is.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
COPIED = (
    "spmd",
    "models",
    "partition_rules",
    "name_maps",
    "examples",
    "benchmarks",
    "tests",
    "pyproject.toml",
)
CI_TIER = "not soak and not architecture"
RUN = """
import sys, pytest
code = pytest.main(sys.argv[2:])
import spmd
open(sys.argv[1], "w").write(spmd.__file__)
sys.exit(code)
"""
"""pytest, and where the package was that it tested."""
NOTICED = ("AssertionError", "assert ", "Failed", "spmd.errors.")
"""How messages begin where a test noticed a bug; else a substitution gave no program, or the test cannot be run."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A bug, and the tests that notice it.

    Attributes:
        file: Where the bug is.
        old: Source that is there once.
        new: What is there instead.
        tests: Of CI's tier, as pytest takes them.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Puts the bug into a copy."""
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        assert source.count(self.old) == 1, (
            f"{self.file} has {source.count(self.old)} times {self.old!r}"
        )
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


MUTATIONS = {
    "wrong psum axis": Mutation(
        "spmd/layers/lm_head.py",
        "totals = tuple(psum(s, layout.summed_axes) for s in sums)",
        "totals = tuple(psum(s, layout.vocabulary) for s in sums)",
        (
            "tests/numerics/test_lm_head.py::test_any_split_of_the_head_equals_one_device[both dimensions]",
        ),
    ),
    "wrong psum axis of a gradient": Mutation(
        "spmd/layers/lm_head.py",
        "psum(dx, tuple(axis for axis in self.layout.word_axes if axis not in scattered))",
        "psum(dx, tuple(axis for axis in self.layout.summed_axes if axis not in scattered))",
        (
            "tests/numerics/test_lm_head.py::test_any_split_of_the_head_equals_one_device[both dimensions]",
        ),
    ),
    "dropped microbatch": Mutation(
        "spmd/gradients/accumulate.py",
        "jax.lax.scan(add, (zeros, carry), (split, keys))",
        "jax.lax.scan(add, (zeros, carry), jax.tree.map(lambda x: x[1:], (split, keys)))",
        ("tests/numerics/test_gradients.py::test_accumulation_equals_the_whole_batch[2-an array]",),
    ),
    "stale slot": Mutation(
        "spmd/pipeline/executor.py",
        'take_slot(slots["saved"], row["backward_saved_slot"])',
        'take_slot(slots["saved"], row["forward_saved_slot"])',
        ("tests/parity/test_pipelines.py::test_a_schedule_from_a_file",),
    ),
    "slot taken too early": Mutation(
        "spmd/pipeline/tick_table.py",
        "if end < first]",
        "if end <= first]",
        ("tests/unit/test_tick_table.py::test_a_file_in_another_order",),
    ),
    "transposed spec": Mutation(
        "spmd/sharding/rules.py",
        "return P(*insert_stacked(layer, self.layer_path(path)[1], dims_of(path, self.stacks)))",
        "return P(*insert_stacked([*layer][::-1], self.layer_path(path)[1], dims_of(path, self.stacks)))",
        ("tests/unit/test_plan.py::test_the_text_of_a_plan_is_as_reviewed[llama-zero3]",),
    ),
    "swapped q/k map": Mutation(
        "models/published/family.py",
        """
    "attention/q_proj": "self_attn.q_proj",
    "attention/k_proj": "self_attn.k_proj",
""",
        """
    "attention/q_proj": "self_attn.k_proj",
    "attention/k_proj": "self_attn.q_proj",
""",
        ("tests/numerics/test_hf.py::test_a_tensor_is_the_transpose_of_a_layer",),
    ),
    "un-donated state": Mutation(
        "spmd/training/step.py",
        "jax.jit(self._step, donate_argnums=0, out",
        "jax.jit(self._step, out",
        ("tests/numerics/test_step.py::test_the_state_is_donated",),
    ),
    "skipped clip": Mutation(
        "spmd/optim/config.py",
        "return clip.update(gradients, clip.init(gradients))[0], {}",
        "return gradients, {}",
        ("tests/numerics/test_optim.py::test_clip_is_over_the_whole_gradient",),
    ),
    "wrong seed fold": Mutation(
        "spmd/training/state.py",
        "jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=PRNG), self.step)",
        "jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=PRNG), 0)",
        ("tests/numerics/test_step.py::test_every_step_has_a_key_of_its_own",),
    ),
    "one key for all microbatches": Mutation(
        "spmd/gradients/accumulate.py",
        "keys = jax.random.split(key, count)",
        "keys = jnp.stack([key] * count)",
        ("tests/numerics/test_gradients.py::test_every_microbatch_has_a_key_of_its_own",),
    ),
    "off-by-one resume": Mutation(
        "spmd/data/loader.py",
        "grain.MapDataset.range(start, steps)",
        "grain.MapDataset.range(min(start, 1) + start, steps)",
        (
            "tests/numerics/test_data.py::test_a_resumed_run_sees_exactly_the_remaining_batches[0-4]",
        ),
    ),
    "off-by-one resume of a run": Mutation(
        "spmd/run/session.py",
        "run.open_batches(start + skipped, steps + skipped, point.loader)",
        "run.open_batches(start + skipped + (start > 0), steps + skipped + (start > 0))",
        (
            "tests/numerics/test_divergence.py"
            "::test_a_run_rolls_back_behind_the_batches_that_led_there[weights-np.nan-flags0]",
        ),
    ),
    "missing weight in loss": Mutation(
        "spmd/layers/lm_head.py",
        "sums = ((normalizer - softmax.target) * weights).sum(), (is_correct * weights).sum()",
        "sums = (normalizer - softmax.target).sum(), (is_correct * weights).sum()",
        (
            "tests/numerics/test_lm_head.py::test_some_tokens_at_a_time_are_the_loss_of_all[io-1024]",
        ),
    ),
    "missing weight in a gradient": Mutation(
        "spmd/layers/lm_head.py",
        "dlogits = (probabilities - is_target) * weights[..., None]",
        "dlogits = probabilities - is_target",
        (
            "tests/numerics/test_lm_head.py::test_some_tokens_at_a_time_are_the_loss_of_all[io-1024]",
        ),
    ),
    "wrong ring order": Mutation(
        "spmd/layers/ring_attention.py",
        "path = [(i, (i + 1) % self.devices) for i in range(self.devices)]",
        "path = [(i, (i - 1) % self.devices) for i in range(self.devices)]",
        (
            "tests/numerics/test_context.py::test_split_attention_is_attention[False-{'sequence': 4}-causal]",
        ),
    ),
    "wrong ZeRO stage": Mutation(
        "spmd/sharding/optimizer_state.py",
        '2: ("optimizer", "gradients"),',
        '2: ("optimizer",),',
        ("tests/unit/test_plan.py::test_zero_stages_split_what_they_say[2-1-8-8]",),
    ),
    "wrong ZeRO stage in a layer": Mutation(
        "spmd/plan/resolve.py",
        "(spec if table in ZERO_KEEPS[zero] else used",
        "(spec if table in ZERO_KEEPS[3] else used",
        ("tests/numerics/test_collective_bytes.py::test_bytes_are_the_closed_form[zero 1]",),
    ),
}


def copy(folder: Path) -> Path:
    """What tests need of the repository."""
    for name in COPIED:
        here, there = ROOT / name, folder / name
        if here.is_dir():
            shutil.copytree(
                here, there, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(here, there)
    return folder


def run(root: Path, cache: Path, tests: tuple[str, ...]) -> tuple[int, list[str], str]:
    """Pytest's exit code in a copy, the message of each failure, and what was printed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment |= {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(cache),
    }
    options = (
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp=temporary",
        "--junitxml=results.xml",
        "-m",
        CI_TIER,
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, "imported", *options, *tests],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    printed = done.stdout[-6000:] + done.stderr[-2000:]
    imported = (root / "imported").read_text(encoding="utf-8")
    assert imported == str(root / "spmd" / "__init__.py"), f"{imported} was tested\n{printed}"
    failures = ElementTree.parse(root / "results.xml").iter("failure")
    return done.returncode, [failure.get("message", "") for failure in failures], printed


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs for all copies: those that tests here share have the places of their sources in them."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_is_noticed(name: str, tmp_path: Path, cache: Path) -> None:
    """A test of CI's tier fails, by what it asserts or by an error of the library."""
    mutation = MUTATIONS[name]
    root = copy(tmp_path)
    mutation.apply(root)
    code, failures, printed = run(root, cache, mutation.tests)
    assert code == pytest.ExitCode.TESTS_FAILED, printed
    assert len(failures) == 1, printed
    assert failures[0].startswith(NOTICED), printed


def test_control_without_a_bug_the_same_tests_pass(tmp_path: Path, cache: Path) -> None:
    """The same tests, in a copy that nothing was changed in."""
    tests = tuple(dict.fromkeys(test for mutation in MUTATIONS.values() for test in mutation.tests))
    code, failures, printed = run(copy(tmp_path), cache, tests)
    assert (code, failures) == (pytest.ExitCode.OK, []), printed
