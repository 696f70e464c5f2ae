"""Losses as global sums, so that every mesh and every accumulation setting gives the same mean.

A `LossFn` returns *sums* over the tokens of its batch. The step divides once by the sum of weights: a mean of means
would depend on how padding is distributed over the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Bool, Float, Int

from spmd import tree
from spmd.errors import ConfigError, Problem, shown
from spmd.jaxpr.examples import declared_scope
from spmd.layers.lm_head import CHUNK, LazyLogits, chunked_cross_entropy, lazy_logits
from spmd.layers.zigzag import zigzag_batch
from spmd.model_api.model import VALID, Model, Outputs, as_outputs
from spmd.sharding.mesh import BATCH_AXES

Sums = dict[str, Any]
"""Weighted sums over tokens, float32 scalars: `loss`, `weight`, and any other metric by its name.

`arrays`, if there, has arrays of such sums by their names. `values`, if there, has what is no sum, such as a maximum or
a histogram, by its name: a step reports it as it is.
"""

VALUES = "values"

LossFn = Callable[[Any, Any, Any, jax.Array], tuple[Sums, Any]]
"""`(params, variables, batch, key) -> (Sums, updated variables)`; the sum `loss` is differentiated."""


_NO_LOSS = "The loss function does not return what a step needs:"
_NO_BATCH = "The batch does not fit the loss:"
_RETURN = 'return {"loss": losses.sum(), "weight": weights.sum()}, variables'


def check_returned(returned: Any, variables: Any) -> tuple[Sums, Any]:
    """Return the sums, as arrays, and the variables that a loss function returned, or raise a `ConfigError`."""
    is_tuple = isinstance(returned, tuple)
    if is_tuple and len(returned) == 2 and _is_scalar(returned[0]):  # a mean of weight 1
        returned = {"loss": returned[0], "weight": jnp.float32(1)}, returned[1]
    if not (is_tuple and len(returned) == 2 and isinstance(returned[0], Mapping)):
        what = f"returns ({', '.join(map(shown, returned))})" if is_tuple else f"returns {shown(returned)}"
        fix = "pass it as grad_fn=" if is_tuple and len(returned) == 3 else _RETURN
        raise ConfigError(_NO_LOSS, [Problem("loss_fn", what, fix=fix)])
    sums, after = returned
    missing = [name for name in ("loss", "weight") if name not in sums]
    problems = [Problem("loss_fn", f"returns no {name!r} among its sums", f"{list(sums)}", _RETURN) for name in missing]
    scalars, _ = split_arrays(sums)
    values = scalars.pop(VALUES, {})
    problems += _value_problems(values, sums)
    for name, value in scalars.items():
        kind = jnp.result_type(value)
        if jnp.shape(value):
            what, fix = f"has the shape {jnp.shape(value)}", 'sum it over the batch; or put it in sums["values"]'
            problems.append(Problem(f"sum {name!r}", what, fix=fix))
        elif kind.itemsize < 4 or not jnp.issubdtype(kind, jnp.floating if name == "loss" else jnp.number):
            problems.append(Problem(f"sum {name!r}", f"is {kind}", fix="cast to float32 before summing"))
        elif name in ("tokens", "gradient_norm", "gradients"):
            problems.append(Problem(f"sum {name!r}", "is a metric that the step adds", fix="another name"))
    fix = "return the variables that model.forward returned, or else those that were given"
    if after is None:
        problems.append(Problem("variables", "are None", fix=fix))
    elif unlike := tree.check_like(after, variables, "variables"):
        problems += [dataclasses.replace(problem, fix=fix) for problem in unlike]
    if problems:
        raise ConfigError(_NO_LOSS, problems)
    return jax.tree.map(jnp.asarray, dict(sums)), after


def _value_problems(values: Any, sums: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with the values that are reported as they are."""
    if not isinstance(values, Mapping):
        return [Problem("values", f"are {shown(values)}", fix='{"values": {"largest": logits.max()}}')]
    taken = (*sums, "tokens", "gradient_norm", "gradients")
    return [
        Problem(f"value {name!r}", "has the name of another metric", fix="another name")
        for name in values
        if name in taken
    ]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.shape


def split_arrays(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split sums or metrics into scalars and arrays, each by name."""
    scalars = dict(values)
    return scalars, dict(scalars.pop("arrays", {}))


def cross_entropy(
    logits: Float[Array, "batch seq vocab"] | LazyLogits,
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    chunk: int = CHUNK,
) -> Sums:
    """Return the next-token cross-entropy in nats, the weight and the accuracy, as weighted sums.

    A target whose logit ties with the largest counts as predicted.

    Args:
        logits: Logits in any float dtype, cast to float32 unless they are wider. The vocabulary may be split over
            devices: a masked sum selects the target's logit without a gather. With `LazyLogits`, never all logits exist
            at once.
        weights: 0 for padding, otherwise 1.
        chunk: Tokens of a device whose logits exist at once, for `LazyLogits`.
    """
    tokens = (logits.x if isinstance(logits, LazyLogits) else logits).shape[:-1]
    if not tokens == targets.shape == weights.shape:
        what = f"have the shapes {targets.shape} and {weights.shape}, and the logits are of {tokens}"
        raise ConfigError("There is no cross-entropy:", [Problem("targets and weights", what, fix="one for each")])
    if isinstance(logits, LazyLogits):
        loss, correct = chunked_cross_entropy(logits, targets, weights, chunk)
        return {"loss": loss, "weight": weights.sum(), "accuracy": correct}
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    target = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - target
    # logsumexp computes the maximum anyway; an argmax, which breaks ties, would need a second copy of the logits.
    correct = (target >= logits.max(axis=-1)).astype(jnp.float32)
    return {"loss": (losses * weights).sum(), "weight": weights.sum(), "accuracy": (correct * weights).sum()}


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """A `LossFn` of a model's outputs, in parts that a pipeline recomposes.

    Attributes:
        inputs: Batch → the model's inputs.
        sums: `(Outputs, batch)` → `Sums`.
        train: Whether the model runs in training mode (dropout, updates of batch statistics) or in evaluation mode.
        additive: Whether the sums are declared to be sums over examples, so that this is not read from the loss.
        weighted: Whether `sums` adds up losses that are multiplied by their weights, as `cross_entropy` does, so that
            none can be a mean, and this is not read from the loss.

    A `padding_aware` model also gets the batch's `valid_tokens`.
    """

    model: Model
    inputs: Callable[[Any], tuple[Any, ...]]
    sums: Callable[[Outputs, Any], Sums]
    train: bool = True
    additive: bool = False
    weighted: bool = False

    def prepare(self, batch: Any) -> Any:
        """Return the batch with the mask of its tokens, for a model that takes it. Tokens must be in their order."""
        if not self.model.info().padding_aware:
            return batch
        valid = valid_tokens(batch)
        return batch if valid is None else {**batch, VALID: valid}

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's inputs and keywords of a prepared batch."""
        takes_valid = self.model.info().padding_aware and isinstance(batch, Mapping) and VALID in batch
        return self.inputs(batch), {VALID: batch[VALID]} if takes_valid else {}

    def __call__(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        """Return the sums of a batch, and the updated variables."""
        batch = self.prepare(batch)
        with zigzag_batch(batch, position_aware=self.model.info().position_aware) as batch, lazy_logits():
            inputs, keywords = self.arguments(batch)
            returned, variables = self.model.forward(params, variables, key, *inputs, train=self.train, **keywords)
            return self.sums(as_outputs(returned), batch), variables


def valid_tokens(batch: Any) -> Bool[Array, "batch seq"] | None:
    """Return the mask of the tokens that are no padding; None if a batch does not tell.

    It is the batch's array `valid`, or else all tokens of a row up to its last positive weight: a weight of 0 before
    that, as of a prompt in fine-tuning, is no padding. `weights` that are not `[batch, sequence]` do not tell.

    Example:
        >>> valid_tokens({"weights": jnp.array([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])}).astype(int).tolist()
        [[1, 1, 1, 0], [0, 0, 0, 0]]
    """
    if not isinstance(batch, Mapping):
        return None
    weights = batch.get("weights")
    if VALID in batch:
        valid = jnp.asarray(batch[VALID])
        if weights is not None and valid.shape != weights.shape:
            what = f"has the shape {valid.shape}, and the weights have {weights.shape}"
            raise ConfigError(_NO_BATCH, [Problem(f"batch {VALID}", what, fix="one for each")])
        return valid != 0
    if weights is None or weights.ndim != 2:
        return None
    number = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1) + 1
    lengths = jnp.where(weights > 0, number, 0).max(axis=1, keepdims=True)
    return number <= lengths


def next_token_loss(model: Model, *, train: bool = True, chunk: int = CHUNK) -> ModelLoss:
    """Return the loss of a language model on batches of `tokens`, `targets` and `weights`, each `[batch, sequence]`.

    A batch may also have `segments`, the document of each token: the second input of the model; and `valid`, the mask
    of its tokens (`valid_tokens`). The model returns logits `[batch, sequence, vocab]` or
    `spmd.model_api.model.Outputs`, whose losses are added in training.
    """
    sums = functools.partial(next_token_sums, train=train, chunk=chunk)
    return ModelLoss(model, _tokens, sums, train, weighted=True)


def next_token_sums(outputs: Outputs, batch: Any, *, train: bool, chunk: int = CHUNK) -> Sums:
    """Return the cross-entropy of the next token, and each auxiliary loss and metric, as weighted sums.

    Raises:
        ConfigError: Logits are computed in chunks, and the model returns whole ones.
    """
    if chunk != CHUNK and not isinstance(outputs.logits, LazyLogits):
        fix = "leave it out, or return spmd.layers.lm_head.LazyLogits"
        problem = Problem("logits_chunk", f"is {chunk}, and the model returns whole logits", fix=fix)
        raise ConfigError("A setting of the loss acts on nothing:", [problem])
    sums = cross_entropy(outputs.logits, *_take(batch, "targets", "weights"), chunk=chunk)
    # The step divides by the weight, so a value of the batch is multiplied by it: zero if all tokens are padding.
    others = {name: _of_microbatch(name, value, sums) for name, value in {**outputs.losses, **outputs.metrics}.items()}
    arrays = {name: _of_microbatch(name, value, sums) for name, value in outputs.arrays.items()}
    around = get_abstract_mesh()
    is_part = any(around.shape[axis] > 1 for axis in around.manual_axes if axis in BATCH_AXES)
    if (others or arrays) and is_part and not outputs.of_all_devices:
        named = ", ".join([*others, *arrays])
        problem = Problem(named, "are of all examples of a microbatch", fix="--exchange-once none")
        raise ConfigError("A device cannot compute the loss of its examples alone:", [problem])
    loss = sum((others[name] for name in outputs.losses if train), start=sums["loss"])
    return {**sums, **others, "loss": loss, **({"arrays": arrays} if arrays else {})}


def _of_microbatch(name: str, value: Array, sums: Sums) -> Array:
    """Return a value of a whole microbatch as one of the sums."""
    with jax.named_scope(declared_scope(name)):
        return value * sums["weight"]


def _tokens(batch: Any) -> tuple[Any, ...]:
    return _take(batch, "tokens", *(["segments"] if "segments" in batch else []))


def _take(batch: Any, *names: str) -> tuple[Any, ...]:
    known = list(batch) if isinstance(batch, Mapping) else [shown(batch)]
    if missing := [Problem("batch", f"has no {name!r}", f"it has {known}") for name in names if name not in known]:
        raise ConfigError(_NO_BATCH, missing)
    return tuple(batch[name] for name in names)


def classification_loss(model: Model, *, train: bool = True) -> ModelLoss:
    """Return the loss of a classifier on batches of `images`, `labels` and `weights`: cross-entropy over classes.

    `labels` and `weights` are `[batch]`, logits `[batch, classes]`; the step counts images as `tokens`.
    """
    return ModelLoss(model, lambda batch: _take(batch, "images"), _class_sums, train, weighted=True)


def _class_sums(outputs: Outputs, batch: Any) -> Sums:
    labels, weights = _take(batch, "labels", "weights")
    return cross_entropy(outputs.logits[:, None], labels[:, None], weights[:, None])
