"""Optimizer state is mapped by structure: each dimension of a statistic is the parameter's dimension it came from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from optax import contrib

from spmd.optim.per_layer import per_layer
from spmd.sharding.layer_paths import stacks_of
from spmd.sharding.mesh import shards_of
from spmd.sharding.optimizer_state import MAX_CONSTANT_BYTES, DerivedSpec, optimizer_specs
from spmd.tree import flatten

AXES = ("fsdp", "tensor", "data")
MESH = {"pipe": 2, "fsdp": 2, "tensor": 2, "data": 2}


def derive(
    init: Any,
    shapes: Any,
    specs: dict[str, P] | None = None,
    stacked: tuple[str, ...] = ("layers",),
) -> tuple[dict[str, DerivedSpec], list[str]]:
    """The table, and where the problems are; a spec names one axis for each dimension unless given."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    dims = {path: range(len(stacks_of(path, stacked))) for path in flatten(params)}
    specs = specs or {
        path: P(*("pipe",) * len(dims[path]), *AXES[: len(leaf.shape) - len(dims[path])])
        for path, leaf in flatten(params).items()
    }
    table, problems = optimizer_specs(init, params, specs, dims)
    return table, [problem.where for problem in problems]


def specs_of(init: Any, shapes: Any, **options: Any) -> dict[str, P]:
    table, problems = derive(init, shapes, **options)
    assert not problems
    return {path: leaf.spec for path, leaf in table.items()}


@pytest.mark.parametrize(
    "shape", [(126, 127), (127, 127), (127, 128), (128, 128), (128, 129), (3, 127, 127), (64, 200)]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_sizes_around_a_threshold(shape: tuple[int, ...], stacked: bool) -> None:
    """Adafactor factors from 128 on; sizes on either side of it, which the probe may cross, are mapped."""
    shapes = {"layers": {"kernel": (4, *shape)}} if stacked else {"kernel": shape}
    table, problems = derive(per_layer(optax.scale_by_factored_rms()).init, shapes)
    assert not problems
    lead = ("pipe",) if stacked else ()
    rows = next(leaf for path, leaf in table.items() if "v_row" in path)
    if sorted(shape)[-2] < 128:
        # no row statistic is kept: a placeholder of size 1
        assert rows.spec == P(*lead, *(None,) * len(lead))
    else:
        assert rows.spec == P(*lead, "fsdp")
    assert {path for path, leaf in table.items() if leaf.shape == (1,) and any(leaf.spec)} == set()


def test_the_probe_asks_for_nothing_that_a_size_tells() -> None:
    """An optimizer that goes another way on the probe is mapped by sizes that occur once; equal ones are an error."""

    def init(params: Any) -> Any:
        return jax.tree.map(
            lambda p: p.sum(axis=0) if p.shape[1] == 8 else p.sum(axis=(0, 1)), params
        )

    assert specs_of(init, {"a": (4, 8, 16)}) == {"a": P("tensor", "data")}
    assert derive(init, {"a": (8, 8, 16)})[1] == ["optimizer state a"]


def test_sm3_has_one_accumulator_for_each_dimension() -> None:
    """Each vector takes the entry of its dimension, in a square matrix and on a stack too."""
    specs = specs_of(optax.scale_by_sm3().init, {"square": (8, 8), "layers": {"kernel": (8, 8, 8)}})
    assert [specs[f"mu/square/{i}"] for i in range(2)] == [P("fsdp"), P("tensor")]
    assert [specs[f"mu/layers/kernel/{i}"] for i in range(3)] == [P("pipe"), P("fsdp"), P("tensor")]


def test_dimensions_of_the_optimizer_are_whole() -> None:
    """L-BFGS keeps its last ten updates: the ten is no dimension of a parameter, even of one of size ten."""
    specs = specs_of(
        optax.scale_by_lbfgs().init, {"kernel": (10, 9), "layers": {"kernel": (10, 10, 4)}}
    )
    assert specs["diff_params_memory/kernel"] == P(None, "fsdp", "tensor")
    assert specs["diff_params_memory/layers/kernel"] == P(None, "pipe", "fsdp", "tensor")
    assert specs["weights_memory"] == P()


def test_a_dimension_that_occurs_twice_is_split_once() -> None:
    """Shampoo's square of a dimension uses its axis for the first occurrence only."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: [jnp.zeros((n, n)) for n in p.shape], params)

    assert specs_of(init, {"a": (8, 8)}) == {"a/0": P("fsdp", None), "a/1": P("tensor", None)}


def test_small_constants_are_replicated_and_say_so() -> None:
    """Muon's coefficients are no parameter's; also where a stack is as long as they are many."""
    table, problems = derive(
        contrib.muon(0.1).init, {"layers": {"kernel": (3, 3, 3)}, "kernel": (3, 3)}
    )
    constant = next(leaf for path, leaf in table.items() if path.endswith("ns_coeffs"))
    assert not problems
    assert (constant.spec, constant.source) == (P(), "a constant of the optimizer")


@pytest.mark.parametrize("in_tree", [False, True])
def test_large_constants_are_refused(in_tree: bool) -> None:
    """What depends on no parameter and is large would be whole on every device without anyone having said so."""
    large = np.zeros(MAX_CONSTANT_BYTES // 4 + 1, np.float32)

    def init(params: Any) -> Any:
        return jax.tree.map(lambda _: large, params) if in_tree else [large, large[:-1]]

    expected = ["optimizer state kernel"] if in_tree else ["optimizer state 0"]
    assert derive(init, {"kernel": (4, 8)})[1] == expected


def test_counters_of_layers_follow_their_stack() -> None:
    """Stacks of one length that are split over different axes are told apart by their axis."""
    shapes = {"layers": {"a": (4, 8)}, "blocks": {"b": (4, 8)}}
    specs = {"layers/a": P("pipe"), "blocks/b": P("data")}
    counter = per_layer(optax.scale_by_schedule(lambda _: 1.0), stacked=("layers", "blocks"))
    found = specs_of(counter.init, shapes, specs=specs, stacked=("layers", "blocks"))
    assert found == {
        "rest/count": P(),
        "stacked/blocks/count": P("data"),
        "stacked/layers/count": P("pipe"),
    }


def test_random_keys_are_replicated() -> None:
    """Typed keys and raw ones are the same on every device, and so is what they draw."""
    state = {"typed": jax.random.key(0), "raw": jax.random.key_data(jax.random.key(0))}
    table, problems = derive(lambda params: state, {"kernel": (2, 8)})
    assert not problems
    assert {(leaf.spec, leaf.source) for leaf in table.values()} == {(P(), "a random key")}


def test_an_init_with_arrays_of_its_own_needs_no_probe() -> None:
    """State that starts from given parameters can be made for their shapes only, and still follows them."""
    start = {"kernel": np.ones((8, 8), np.float32)}

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p, s: p - s, params, start)

    assert specs_of(init, {"kernel": (8, 8)}) == {"kernel": P("fsdp", "tensor")}


def test_control_an_order_that_is_not_kept_gives_the_wrong_dimension() -> None:
    """Control: were the probe to turn equal sizes around, Adafactor's rows of a square would be its columns."""
    rows = optax.scale_by_factored_rms(min_dim_size_to_factor=8).init
    assert jax.eval_shape(rows, {"a": jax.ShapeDtypeStruct((9, 8), jnp.float32)}).v_row[
        "a"
    ].shape == (8,)
    assert jax.eval_shape(rows, {"a": jax.ShapeDtypeStruct((8, 9), jnp.float32)}).v_row[
        "a"
    ].shape == (8,)
    assert specs_of(rows, {"a": (8, 8)})["v_row/a"] == P("fsdp")


SHAPES = st.lists(st.sampled_from((2, 4, 6, 8)), min_size=1, max_size=3).map(tuple)
TREES = st.builds(
    lambda beside, stacked, layers: {
        "beside": beside,
        "layers": {n: (layers, *s) for n, s in stacked.items()},
    },
    st.dictionaries(st.sampled_from("abc"), SHAPES, min_size=1),
    st.dictionaries(st.sampled_from("de"), SHAPES, min_size=1),
    st.sampled_from((2, 4, 8)),
)
OPTIMIZERS = {
    "adamw": optax.adamw(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4, momentum=0.9),
    "adafactor per layer": per_layer(optax.adafactor(0.1, min_dim_size_to_factor=4)),
    "sm3": optax.sm3(0.1),
    "sm3 per layer": per_layer(optax.sm3(0.1)),
    "lbfgs": optax.scale_by_lbfgs(memory_size=4),
}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(shapes=TREES, name=st.sampled_from(sorted(OPTIMIZERS)))
def test_every_derived_spec_fits_its_leaf(shapes: Any, name: str) -> None:
    """Whatever the shapes, a spec has no more entries than dimensions, divides them, and uses each axis once."""
    table, problems = derive(OPTIMIZERS[name].init, shapes)
    assert not problems
    for path, leaf in table.items():
        assert len(leaf.spec) <= len(leaf.shape), path
        assert all(
            size % shards_of(entry, MESH) == 0
            for size, entry in zip(leaf.shape, leaf.spec, strict=False)
        ), path
        used = [entry for entry in leaf.spec if entry]
        assert len(used) == len(set(used)), path
