"""How a parameter travels is a value of its placement, which every layer asks: of blocks, of experts, of the head."""

import dataclasses

import numpy as np

from spmd import tree
from spmd.gradients.losses import next_token_loss
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.settings.compress import CompressConfig
from spmd.sharding.param_comm import ParamComm
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

CONFIG = dataclasses.replace(PRESETS["test"], layers=1)


class Doubled(ParamComm):
    """Sends twice the gradient, and a copy of the parameter in two parts: `prepare` returns a tree."""

    @property
    def takes_uncast(self):
        return True

    @property
    def checkpoint_name(self):
        return "halves"

    def prepares(self, layout):
        return layout.is_gathered

    def prepare(self, shard, layout):
        return {"half": shard / 2, "rest": shard / 2} if self.prepares(layout) else shard

    def gather(self, prepared, layout, dtype):
        whole = prepared["half"] + prepared["rest"] if self.prepares(layout) else prepared
        return super().gather(whole, layout, dtype)

    def reduce(self, gradient, layout, axes):
        return 2 * super().reduce(gradient, layout, axes)


@dataclasses.dataclass(frozen=True)
class DoubleAll(CompressConfig):
    """A setting that makes it."""

    def param_comm(self, *args, **options):
        return Doubled(super().param_comm(*args, **options).gradients)


def gradients(compress):
    """Loss and gradients of a step, by path."""
    model = from_nnx(CONFIG.build)
    mesh = tiny.mesh(fsdp=2, expert=2)
    plan = make_plan(mesh, MIXTRAL, model, tiny.OPTIMIZER, compress=compress, remat="full")
    step = make_train_step(plan, next_token_loss(model), keep_gradients=True)
    batch = token_batches((4, 16), CONFIG.vocab, steps=1)[0]
    metrics = step(init_state(plan, 0), place_batch(plan, batch))[1]
    return metrics["loss"], tree.flatten(metrics["gradients"])


def test_a_comm_of_ones_own_is_used_by_every_layer():
    """Kernels of attention, router, experts and head send twice the gradient; others, the control, send their own."""
    loss, plain = gradients(CompressConfig())
    other, doubled = gradients(DoubleAll())
    assert loss == other
    for path, gradient in plain.items():
        factor = 2 if path.endswith("/kernel") else 1
        if path == "lm_head/kernel":
            # its sum has two parts: a scatter of each chunk of the vocabulary, and the other axes
            factor = 4
        np.testing.assert_allclose(
            doubled[path], factor * gradient, rtol=1e-5, atol=1e-9, err_msg=path
        )


def test_comms_are_compared_by_value():
    """Equal plans share a compiled step; another comm makes another plan."""
    assert ParamComm((("data", "bfloat16"),)) == ParamComm((("data", "bfloat16"),))
    assert hash(Doubled()) == hash(Doubled())
    assert Doubled() != ParamComm()
