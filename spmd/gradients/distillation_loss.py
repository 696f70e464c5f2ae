"""Distillation: a model is trained to predict what a larger, frozen teacher predicts.

The loss of a token is (1 − w) · cross-entropy + w · T² · KL(teacher ‖ student), both distributions at
the temperature T (Hinton et al., arXiv:1503.02531, section 2). The teacher runs in the step, by a
plan of its own: its parameters are whole arrays of the batch and keep their sharding.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem, check_type, describe_value
from spmd.gradients.losses import (
    ModelInputs,
    Sums,
    check_answers,
    check_chunk,
    cross_entropy,
    microbatch_losses,
    take_arrays,
    token_inputs,
)
from spmd.layers.lm_head import CHUNK, LazyLogits, at_temperature, lazy_logits
from spmd.layers.logit_divergence import token_divergences
from spmd.layers.zigzag import zigzag_batch
from spmd.model_interface.model import Model, Outputs, as_outputs
from spmd.plan.context import current, override, use_plan
from spmd.plan.plan import ShardingPlan
from spmd.settings.distillation import DistillationConfig
from spmd.sharding.batch import WholeArrays
from spmd.tree import check_like, flatten

TEACHER = "teacher"
"""Name of the teacher's parameters in a batch: `spmd.whole(params)`."""


@dataclasses.dataclass(frozen=True)
class DistillationLoss:
    """A `LossFn` of a student and a teacher; make one by `distillation_loss`."""

    model: Model
    teacher: ShardingPlan
    config: DistillationConfig
    chunk: int = CHUNK
    padded_heads: bool = False
    weighted: bool = True

    def __call__(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        """Return the sums of a batch, and the updated variables."""
        frozen = jax.lax.stop_gradient(self._teacher_in(batch))
        student = ModelInputs(self.model, token_inputs)
        teacher = ModelInputs(self.teacher.model, token_inputs)
        batch = teacher.prepare(student.prepare(batch))
        with (
            zigzag_batch(batch, position_aware=self._is_position_aware) as ordered,
            lazy_logits(),
        ):
            with _layout_of(self.teacher):
                inputs, keywords = teacher.arguments(ordered)
                returned, _ = teacher.model.forward(
                    frozen, {}, None, *inputs, train=False, **keywords
                )
                theirs = as_outputs(returned)
            inputs, keywords = student.arguments(ordered)
            returned, variables = self.model.forward(
                params, variables, key, *inputs, train=True, **keywords
            )
            return self._sums(as_outputs(returned), theirs, ordered), variables

    @property
    def _is_position_aware(self) -> bool:
        """Whether both models can compute on tokens in another order."""
        models = (self.model, self.teacher.model)
        reads_positions = all(model.info().position_aware for model in models)
        return reads_positions and self.teacher.attention.keeps_queries

    def _teacher_in(self, batch: Any) -> Any:
        """Return the parameters of the teacher in a batch, or raise a `ConfigError`."""
        fix = f'batch["{TEACHER}"] = spmd.whole(params), placed by the plan of the teacher'
        if not isinstance(batch, Mapping) or TEACHER not in batch:
            raise ConfigError("No teacher:", [Problem(TEACHER, "is not in the batch", fix=fix)])
        given = batch[TEACHER]
        if not isinstance(given, WholeArrays):
            what = f"is {describe_value(given)}, which would be split as examples are"
            raise ConfigError("No teacher:", [Problem(TEACHER, what, fix=fix)])
        problems = check_like(_shapes(given.value), _shapes(self.teacher.abstract_params), TEACHER)
        if problems:
            raise ConfigError("These are not the parameters of the teacher's plan:", problems)
        return given.value

    def _sums(self, mine: Outputs, theirs: Outputs, batch: Any) -> Sums:
        """Return loss and metrics as weighted sums."""
        check_answers(mine, self.chunk)
        check_chunk(theirs, self.chunk)
        if not self.padded_heads:
            _check_vocabularies(mine.logits, theirs.logits)
        targets, weights = take_arrays(batch, "targets", "weights")
        divergences = token_divergences(
            at_temperature(mine.logits, self.config.temperature),
            at_temperature(theirs.logits, self.config.temperature),
            reverse=self.config.reverse,
            chunk=self.chunk,
        )
        divergence = (divergences * weights).sum()
        sums = cross_entropy(mine.logits, targets, weights, chunk=self.chunk)
        share = self.config.weight
        scaled = self.config.temperature**2 * divergence
        loss = (1 - share) * sums["loss"] + share * scaled
        metrics = {"cross_entropy": sums["loss"], "divergence": divergence}
        return microbatch_losses(mine, {**sums, **metrics, "loss": loss}, train=True)


def distillation_loss(
    model: Model,
    teacher: ShardingPlan,
    config: DistillationConfig | None = None,
    *,
    chunk: int = CHUNK,
    padded_heads: bool = False,
) -> DistillationLoss:
    """Return the loss of a language model beside a frozen teacher with the same vocabulary.

    A batch is as for `spmd.next_token_loss`, and has the parameters of the teacher as
    `spmd.whole(params)`, placed by its plan, on the mesh of the student. The teacher has no
    variables.

    Args:
        chunk: Tokens of a chunk of logits, per device.
        padded_heads: Whether heads may have unlike numbers of outputs, where they have more than
            there are tokens: those that one of them lacks have no share in the divergence.
    """
    problems = check_type(TEACHER, teacher, ShardingPlan, "spmd.make_plan of the teacher's model")
    if chunk < 1:
        problems.append(Problem("chunk", f"is {chunk}", fix="at least 1"))
    if not problems and jax.tree.leaves(teacher.abstract_variables):
        what = "has variables, which a batch does not hold"
        problems.append(Problem(TEACHER, what, fix="a model of parameters alone"))
    if problems:
        raise ConfigError("No distillation:", problems)
    return DistillationLoss(model, teacher, config or DistillationConfig(), chunk, padded_heads)


@contextmanager
def _layout_of(teacher: ShardingPlan) -> Iterator[None]:
    """Put the teacher's plan in scope, in place of the student's; outside of a plan, none."""
    outer = current()
    if outer.mesh is None:
        yield
        return
    if outer.mesh.shape != teacher.mesh.shape:
        what = f"is on the mesh {dict(teacher.mesh.shape)}, the student on {dict(outer.mesh.shape)}"
        problem = Problem(TEACHER, what, fix="make both plans on one mesh")
        raise ConfigError("Two meshes in one step:", [problem])
    with use_plan(teacher), override(lazy_logits=outer.lazy_logits, zigzag=outer.zigzag):
        yield


def _shapes(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return path → the shape of a parameter; a teacher may be stored in any dtype."""
    found = {}
    for path, x in flatten(params).items():
        found[path] = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return found


def _check_vocabularies(mine: Any, theirs: Any) -> None:
    """Raise a `ConfigError` for logits of unlike vocabularies."""
    own = _vocabulary(mine)
    other = _vocabulary(theirs)
    if own != other:
        what = f"predicts {other} tokens, the student {own}"
        why = "a head may have more outputs than its tokenizer has tokens"
        fix = "padded_heads=True, if both have one tokenizer; or a teacher with the student's"
        problem = Problem(TEACHER, what, why, fix)
        raise ConfigError("Unlike vocabularies:", [problem])


def _vocabulary(logits: Any) -> int:
    """Return the size of the vocabulary of logits, or of a head."""
    if isinstance(logits, LazyLogits):
        return logits.kernel.shape[logits.axes.index("o")]
    return logits.shape[-1]
