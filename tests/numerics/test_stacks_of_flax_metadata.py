"""Names in Flax's metadata say which dimension is a stack of layers."""

import flax.linen as nn
import pytest
from flax import nnx
from flax.core import spmd as flax_spmd
from jax.sharding import PartitionSpec as P

from spmd.sharding.flax_metadata import Annotation, linen_annotations, nnx_annotations
from spmd.sharding.from_flax import rules_from_annotations
from spmd.sharding.rules import Rules
from tests.annotated import INIT, LOGICAL, MESH, problems, scanned, stacked

pytestmark = pytest.mark.compat


def test_the_name_of_a_stack_is_what_stacked_says():
    """`nnx.vmap` and `nn.scan` put the name in front; no logical rule is needed for it."""
    for annotations, path in (
        (nnx_annotations(stacked({nnx.PARTITION_NAME: "layers"})), "layers/kernel"),
        (linen_annotations(scanned({nn.meta.PARTITION_NAME: "layers"})), "layers/names/kernel"),
    ):
        assert annotations[path].names[0] == "layers"
        spec = (
            rules_from_annotations(annotations, logical=[("embed", "fsdp"), ("mlp", "data")])
            .match(path)
            .spec
        )
        assert spec in (P("pipe", "fsdp", "data"), P("pipe", "data", "fsdp"))


@pytest.mark.parametrize("metadata", [{}, {nnx.PARTITION_NAME: None}], ids=["unnamed", "None"])
def test_a_stack_without_a_name_keeps_the_names_of_one_layer_in_place(metadata):
    """`nnx.vmap` without a name leaves ('embed', 'mlp') on [layers, embed, mlp]: NNX splits the wrong dimensions."""
    state = stacked(metadata)
    rules = rules_from_annotations(nnx_annotations(state), logical=LOGICAL)
    assert rules.match("layers/kernel").spec == P("pipe", "fsdp", "tensor")
    with flax_spmd.logical_axis_rules(LOGICAL):
        theirs = nnx.get_partition_spec(state)["layers"]["kernel"].get_value()
    assert theirs == (P("fsdp", "tensor") if not metadata else P(None, "fsdp", "tensor"))


def test_linen_does_not_stack_without_a_name():
    """Only NNX shifts names without a word."""
    with pytest.raises(Exception, match="partition_name"):
        scanned({})


def test_a_stack_whose_name_means_another_axis_is_an_error():
    """Both the logical rules and `stacked` speak for the dimension, and must agree."""
    annotations = nnx_annotations(stacked({nnx.PARTITION_NAME: "layers"}))
    (problem,) = problems(annotations, logical=(*LOGICAL, ("layers", "data")))
    assert (
        "its stacked dimension is 'layers', which means ('data',); stacked= says 'pipe'" in problem
    )
    for axis in ("pipe", None):
        assert rules_from_annotations(annotations, logical=(*LOGICAL, ("layers", axis)))
    (problem,) = problems({"layers/w": Annotation(("fsdp", None, "tensor"), (2, 4, 4))})
    assert "'fsdp'" in problem


def test_names_that_fit_neither_the_stack_nor_the_layer_are_an_error():
    """One name on [layers, embed, mlp] could be any dimension's; too many names are a removed dimension's."""
    found = problems(
        {"layers/w": Annotation(("fsdp",), (2, 4, 4)), "w": Annotation(("fsdp", None), (4,))}
    )
    assert "1 names for 3 dimensions" in found[0]
    assert "name all 3, or the 2 of one layer" in found[0]
    assert "2 names for 1 dimensions" in found[1]
    assert "partition_name" in found[1]


def test_numbered_modules_that_differ_have_a_rule_each():
    """One rule serves all unrolled layers that are annotated alike; others are no stack, and keep their numbers."""
    alike = {f"layers/{i}/w": Annotation(("fsdp",), (4,)) for i in range(3)}
    assert len(rules_from_annotations(alike).params) == 1
    rules = rules_from_annotations(alike | {"layers/1/w": Annotation(("tensor",), (4,))})
    assert [rules.match(f"layers/{i}/w").spec for i in range(3)] == [
        P("fsdp"),
        P("tensor"),
        P("fsdp"),
    ]
    assert rules.audit({path: (4,) for path in alike}, MESH.shape) == []


def test_a_table_and_its_annotations_are_stacked_alike():
    """Two meanings of `stacked` are one problem more."""
    found = problems(
        {"w": Annotation(("fsdp",), (4,))}, table=Rules([]), stacked={"blocks": "pipe"}
    )
    assert found[0].startswith(
        "stacked: is (('blocks', 'pipe'),), and in the table (('layers', 'pipe'),)"
    )


def test_nnx_names_give_the_dimension_of_a_stack():
    """`nnx.vmap` along dimension 1 puts the name there; without a name, sizes contradict dimension 0."""

    class Pair(nnx.Module):
        def __init__(self, rngs):
            up, down = (
                nnx.with_partitioning(INIT, names) for names in (("embed", "mlp"), ("mlp", "embed"))
            )
            self.up = nnx.Linear(4, 8, use_bias=False, kernel_init=up, rngs=rngs)
            self.down = nnx.Linear(8, 4, use_bias=False, kernel_init=down, rngs=rngs)

    for metadata in ({nnx.PARTITION_NAME: "layers"}, {}):
        vmapped = nnx.vmap(Pair, in_axes=(0,), out_axes=1, transform_metadata=metadata)
        make = nnx.split_rngs(splits=3)(vmapped)
        with nnx.use_eager_sharding(False):
            pair = nnx.eval_shape(lambda make=make: nnx.Dict(layers=make(nnx.Rngs(0))))
        annotations = nnx_annotations(nnx.state(pair))
        rules = rules_from_annotations(annotations, logical=LOGICAL)
        found = rules.audit({path: own.shape for path, own in annotations.items()}, MESH.shape)
        if metadata:
            assert found == []
            assert rules.match("layers/up/kernel").spec == P("fsdp", "pipe", "tensor")
        else:
            assert "along dimension 1 all have 3" in str(found[0])
