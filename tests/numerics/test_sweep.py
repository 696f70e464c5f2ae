"""Layers of Flax and operations of JAX on random meshes, under random tables, give the numbers of one device.

The first 100 examples; `make soak` has 5,000.
"""

import pytest

from spmd.plan import partition_safe
from tests.sweep import layers
from tests.sweep.run import first_wrong, sweep
from tests.tiers import soak_but

# Layers of Flax with float32 parts, such as a cache, warn about models in float64; a layer is
# deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
]

SEED, COUNT = 41, 100
CONTROL_SEED, MOST_OF_CONTROL = 45, 200


@pytest.mark.parametrize("part", soak_but(range(4)))
def test_every_example_is_as_on_one_device(part):
    """Values, first and second derivatives; nothing is refused."""
    found = sweep(SEED + part, COUNT // 4)
    assert len(found) == COUNT // 4
    wrong = [
        str(result) for result in found if result.difference.refused or not result.difference.ok
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
def test_control_without_the_gather_a_fault_is_found(monkeypatch):
    """If inputs enter the loss as they are stored, XLA computes some of the examples wrongly."""
    monkeypatch.setattr(partition_safe, "gathered", lambda x, placement, **options: x)
    assert first_wrong(CONTROL_SEED, MOST_OF_CONTROL)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_every_layer_of_flax_is_drawn_from(library):
    """A new layer of a newer Flax belongs into the sweep, or into `LEFT_OUT` with the reason."""
    known = layers.COVERED[library] | layers.LEFT_OUT[library].keys()
    assert not layers.exported(library) - known
