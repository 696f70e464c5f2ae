"""Losses as global sums, so that every mesh and every accumulation setting gives the same mean.

A `LossFn` returns *sums* over the tokens of its batch. The step divides once by the sum of weights:
a mean of means would depend on how padding is distributed over the mesh.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spmd import tree
from spmd.errors import ConfigError, Problem, describe_value
from spmd.jaxpr.examples import declared_scope
from spmd.layers.ahead import has_ahead, tokens_ahead
from spmd.layers.lm_head import (
    CHUNK,
    LazyLogits,
    chunked_cross_entropy,
    chunked_token_losses,
    lazy_logits,
)
from spmd.layers.zigzag import zigzag_batch
from spmd.model_interface.model import VALID, Model, Outputs, as_outputs
from spmd.plan.manual import manual_axes
from spmd.sharding.mesh import BATCH_AXES

Sums = dict[str, Any]
"""Weighted sums over tokens, float32 scalars: `loss`, `weight`, and any other metric by its name.

`arrays`, if present, has arrays of such sums by their names. `values`, if present, has results
other than sums, such as a maximum or a histogram, by their names: a step reports them without a
division by the weight.
"""

VALUES = "values"

LossFn = Callable[[Any, Any, Any, jax.Array], tuple[Sums, Any]]
"""`(params, variables, batch, key) -> (Sums, updated variables)`; `loss` is differentiated."""


@runtime_checkable
class DeclaresAdditive(Protocol):
    """Declaration of a `LossFn` about its sums: they are sums over examples."""

    @property
    def additive(self) -> bool:
        """Whether they are, so that this is not read from the loss."""


@runtime_checkable
class DeclaresWeighted(Protocol):
    """Declaration of a `LossFn` about its losses: they are multiplied by their weights."""

    @property
    def weighted(self) -> bool:
        """Whether they are, so that none can be a mean, and this is not read from the loss."""


_STEP_METRICS = ("tokens", "gradient_norm", "gradients")
"""Metrics that a step adds."""

_NO_LOSS = "Invalid result of the loss function:"
_NO_BATCH = "The batch does not fit the loss:"
_RETURN = 'return {"loss": losses.sum(), "weight": weights.sum()}, variables'


def check_returned(returned: Any, variables: Any) -> tuple[Sums, Any]:
    """Check the results of a loss function, and return the sums, as arrays, and the variables.

    Raises:
        ConfigError: A step cannot use them.
    """
    sums, after = _sums_and_variables(returned)
    problems = [*_sum_problems(sums), *_variable_problems(after, variables)]
    if problems:
        raise ConfigError(_NO_LOSS, problems)
    return jax.tree.map(jnp.asarray, dict(sums)), after


def _sums_and_variables(returned: Any) -> tuple[Mapping[str, Any], Any]:
    """Return the two results of a loss function; a scalar in place of sums is a mean, of weight 1.

    Raises:
        ConfigError: They are no sums and variables.
    """
    is_tuple = isinstance(returned, tuple)
    if is_tuple and len(returned) == 2:
        first, after = returned
        if _is_scalar(first):
            return {"loss": first, "weight": jnp.float32(1)}, after
        if isinstance(first, Mapping):
            return first, after
    what = f"returns {describe_value(returned)}"
    fix = _RETURN
    if is_tuple:
        what = f"returns ({', '.join(map(describe_value, returned))})"
        if len(returned) == 3:
            fix = "pass it as grad_fn="
    raise ConfigError(_NO_LOSS, [Problem("loss_fn", what, fix=fix)])


def _is_scalar(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.shape


def _sum_problems(sums: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of the sums of a loss function."""
    for name in ("loss", "weight"):
        if name not in sums:
            what = f"returns no {name!r} among its sums"
            yield Problem("loss_fn", what, f"{list(sums)}", _RETURN)
    scalars, _ = split_arrays(sums)
    values = scalars.pop(VALUES, {})
    yield from _value_problems(values, sums)
    for name, value in scalars.items():
        problem = _scalar_problem(name, value)
        if problem is not None:
            yield problem


def _scalar_problem(name: str, value: Any) -> Problem | None:
    """Return the problem of one sum, None if a step can use it."""
    where = f"sum {name!r}"
    kind = jnp.result_type(value)
    shape = jnp.shape(value)
    if shape:
        fix = 'sum it over the batch; or put it in sums["values"]'
        return Problem(where, f"has the shape {shape}", fix=fix)
    wanted: Any = jnp.number
    if name == "loss":
        wanted = jnp.floating
    if kind.itemsize < 4 or not jnp.issubdtype(kind, wanted):
        return Problem(where, f"is {kind}", fix="cast to float32 before summing")
    if name in _STEP_METRICS:
        return Problem(where, "is a metric that the step adds", fix="another name")
    return None


def _value_problems(values: Any, sums: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of `values`."""
    if not isinstance(values, Mapping):
        fix = '{"values": {"largest": logits.max()}}'
        yield Problem("values", f"are {describe_value(values)}", fix=fix)
        return
    taken = (*sums, *_STEP_METRICS)
    for name in values:
        if name in taken:
            what = "has the name of another metric"
            yield Problem(f"value {name!r}", what, fix="another name")


def _variable_problems(after: Any, variables: Any) -> Iterator[Problem]:
    """Yield the differences of the returned variables from the given ones."""
    fix = "return the variables that model.forward returned, or else those that were given"
    if after is None:
        yield Problem("variables", "are None", fix=fix)
        return
    for problem in tree.check_like(after, variables, "variables"):
        yield dataclasses.replace(problem, fix=fix)


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
    z_loss: float = 0.0,
) -> Sums:
    """Return the next-token cross-entropy in nats, the weight and the accuracy, as weighted sums.

    A target whose logit ties with the largest counts as predicted. With a weight `z_loss`, the loss
    has the squared log-sum-exp of the logits times it, and `logit_z_loss` is this part (Chowdhery
    et al., arXiv:2204.02311, section 5).

    Args:
        logits: Logits in any float dtype, cast to float32 unless they are wider. The vocabulary may
            be split over devices: a masked sum selects the target's logit without a gather. With
            `LazyLogits`, never all logits exist at once.
        weights: 0 for padding, otherwise 1.
        chunk: Tokens of a device whose logits exist at once, for `LazyLogits`.
    """
    if isinstance(logits, LazyLogits):
        _check_shapes(logits.x.shape[:-1], targets, weights)
        loss, correct, *z_sum = chunked_cross_entropy(logits, targets, weights, chunk, z_loss)
        sums = {"loss": loss, "weight": weights.sum(), "accuracy": correct}
        if z_sum:
            sums["logit_z_loss"] = z_sum[0]
        return sums
    _check_shapes(logits.shape[:-1], targets, weights)
    logits = _wide(logits)
    target = _target_logits(logits, targets)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    losses = normalizer - target
    # logsumexp computes the maximum anyway; an argmax, which breaks ties, would need a second copy
    # of the logits.
    correct = (target >= logits.max(axis=-1)).astype(jnp.float32)
    sums = {
        "loss": (losses * weights).sum(),
        "weight": weights.sum(),
        "accuracy": (correct * weights).sum(),
    }
    if z_loss:
        sums["logit_z_loss"] = (z_loss * normalizer**2 * weights).sum()
        sums["loss"] = sums["loss"] + sums["logit_z_loss"]
    return sums


def token_losses(
    logits: Float[Array, "batch seq vocab"] | LazyLogits,
    targets: Int[Array, "batch seq"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Return the next-token cross-entropy of each token in nats, and 1 for predicted targets, else 0.

    Both are in float32 or wider, for losses that are no sum over tokens. The arguments are as in
    `cross_entropy`.
    """
    if isinstance(logits, LazyLogits):
        _check_shapes(logits.x.shape[:-1], targets, targets)
        return chunked_token_losses(logits, targets, chunk)
    _check_shapes(logits.shape[:-1], targets, targets)
    logits = _wide(logits)
    target = _target_logits(logits, targets)
    correct = (target >= logits.max(axis=-1)).astype(jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - target, correct


def _wide(logits: Array) -> Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _target_logits(logits: Array, targets: Array) -> Array:
    """Return the logit of each target, without a gather."""
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    return jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(axis=-1)


def _check_shapes(tokens: tuple[int, ...], targets: jax.Array, weights: jax.Array) -> None:
    """Raise a `ConfigError` unless each token of the logits has a target and a weight."""
    if tokens == targets.shape == weights.shape:
        return
    what = f"have the shapes {targets.shape} and {weights.shape}, and the logits are of {tokens}"
    problem = Problem("targets and weights", what, fix="one for each")
    raise ConfigError("Shape mismatch in cross_entropy:", [problem])


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model from a batch.

    Attributes:
        inputs: Batch → the model's inputs.

    A `padding_aware` model also gets the batch's `valid_tokens`.
    """

    model: Model
    inputs: Callable[[Any], tuple[Any, ...]]

    def prepare(self, batch: Any) -> Any:
        """Add the mask of valid tokens to a batch, for a `padding_aware` model.

        Tokens must be in the order of the sequence, not in zigzag order.
        """
        if not self.model.info().padding_aware:
            return batch
        valid = valid_tokens(batch)
        if valid is None:
            return batch
        return {**batch, VALID: valid}

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's inputs and keywords of a prepared batch."""
        inputs = self.inputs(batch)
        takes_valid = self.model.info().padding_aware
        if takes_valid and isinstance(batch, Mapping) and VALID in batch:
            return inputs, {VALID: batch[VALID]}
        return inputs, {}


@dataclasses.dataclass(frozen=True)
class ModelLoss(ModelInputs):
    """A `LossFn` of a model's outputs, with its parts accessible to a pipeline.

    Attributes:
        sums: `(Outputs, batch)` → `Sums`.
        train: Whether the model runs in training mode (dropout, updates of batch statistics) or in
            evaluation mode.
        additive: Whether the sums are declared to be sums over examples, so that the loss is not
            traced to check this.
        weighted: Whether `sums` adds up losses that are multiplied by their weights, as
            `cross_entropy` does. None can be a mean then, so the loss is not traced to check this.
    """

    sums: Callable[[Outputs, Any], Sums]
    train: bool = True
    additive: bool = False
    weighted: bool = False

    def __call__(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        """Return the sums of a batch, and the updated variables."""
        with self.ordered(batch) as batch, lazy_logits():
            inputs, keywords = self.arguments(batch)
            returned, variables = self.model.forward(
                params, variables, key, *inputs, train=self.train, **keywords
            )
            return self.sums(as_outputs(returned), batch), variables

    @contextlib.contextmanager
    def ordered(self, batch: Any) -> Iterator[Any]:
        """Prepare a batch for the model, with its tokens in the order of the attention.

        The order holds for what is traced inside the `with`.
        """
        position_aware = self.model.info().position_aware
        with zigzag_batch(self.prepare(batch), position_aware=position_aware) as batch:
            yield batch


def valid_tokens(batch: Any) -> Bool[Array, "batch seq"] | None:
    """Return the mask of the tokens other than padding; None if a batch does not determine it.

    The mask is the batch's array `valid`, or else all tokens of a row up to its last positive
    weight: a token of weight 0 before that, as of a prompt in fine-tuning, is no padding. `weights`
    that are not `[batch, sequence]` do not determine it.

    Example:
        >>> weights = jnp.array([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        >>> valid_tokens({"weights": weights}).astype(int).tolist()
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
    number = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1) + 1  # 1, 2, … along a row
    lengths = jnp.where(weights > 0, number, 0).max(axis=1, keepdims=True)
    return number <= lengths


def next_token_loss(
    model: Model, *, train: bool = True, chunk: int = CHUNK, z_loss: float = 0.0
) -> ModelLoss:
    """Return the loss of a language model on batches of `tokens`, `targets` and `weights`.

    Each is `[batch, sequence]`. A batch may also have `segments`, the document of each token: the
    second input of the model; and `valid`, the mask of its tokens (`valid_tokens`). The model
    returns logits `[batch, sequence, vocab]` or `spmd.model_interface.model.Outputs`, whose losses
    are added in training. So is `z_loss` times the squared log-sum-exp of the logits.
    """
    sums = functools.partial(next_token_sums, train=train, chunk=chunk, z_loss=z_loss)
    return ModelLoss(model, token_inputs, sums, train, weighted=True)


def next_token_sums(
    outputs: Outputs, batch: Any, *, train: bool, chunk: int = CHUNK, z_loss: float = 0.0
) -> Sums:
    """Return cross-entropy of the next token, auxiliary losses and metrics, as weighted sums.

    Raises:
        ConfigError: Logits are computed in chunks, and the model returns whole ones.
    """
    check_chunk(outputs, chunk)
    targets, weights = take_arrays(batch, "targets", "weights")
    own_z_loss = z_loss if train else 0.0
    own = cross_entropy(outputs.logits, targets, weights, chunk=chunk, z_loss=own_z_loss)
    sums = microbatch_losses(outputs, own, train=train)
    if outputs.ahead:
        ahead = _ahead_loss(outputs.ahead, batch, targets, weights, chunk)
        sums["ahead_loss"] = ahead
        if train:
            sums["loss"] = sums["loss"] + outputs.ahead_weight * ahead
    return sums


def check_chunk(outputs: Outputs, chunk: int) -> None:
    """Raise a `ConfigError` if logits are to be computed in chunks, and the model returns whole ones."""
    if chunk == CHUNK or isinstance(outputs.logits, LazyLogits):
        return
    fix = "leave it out, or return spmd.layers.lm_head.LazyLogits"
    what = f"is {chunk}, and the model returns whole logits"
    problem = Problem("logits_chunk", what, fix=fix)
    raise ConfigError("Loss setting without effect:", [problem])


def check_answers(outputs: Outputs, chunk: int) -> None:
    """Raise a `ConfigError` for outputs or a chunk that a loss of answers cannot use.

    The tokens further ahead that a model predicts would not be trained.
    """
    check_chunk(outputs, chunk)
    if outputs.ahead:
        what = "predicts tokens further ahead, which a loss of answers does not train"
        problem = Problem("the model", what, fix="a config without it, such as predict_ahead=0")
        raise ConfigError("Parameters without a gradient:", [problem])


def microbatch_losses(outputs: Outputs, sums: Sums, *, train: bool) -> Sums:
    """Add a model's auxiliary losses, metrics and arrays of a microbatch to the sums of a loss.

    In training, the auxiliary losses are also added to the loss.
    """
    others = _of_microbatch({**outputs.losses, **outputs.metrics}, sums)
    arrays = _of_microbatch(outputs.arrays, sums)
    if not outputs.of_all_devices:
        _check_whole_microbatch([*others, *arrays])
    loss = sums["loss"]
    if train:
        for name in outputs.losses:
            loss = loss + others[name]
    found = {**sums, **others, "loss": loss}
    if arrays:
        found["arrays"] = arrays
    return found


def _ahead_loss(
    ahead: Sequence[Any], batch: Any, targets: Array, weights: Array, chunk: int
) -> Array:
    """Return the mean of the losses of tokens further ahead, each a weighted sum.

    A token counts where the one ahead is of the same document and has a weight. As in equation 24
    of DeepSeek-V3 (arXiv:2412.19437), a loss is divided by the weight of all tokens, like the
    next-token loss, although the last ones have no token ahead.
    """
    segments = batch.get("segments")
    total = jnp.float32(0)
    for steps, logits in enumerate(ahead, 1):
        is_inside = has_ahead(segments, targets.shape[1], steps)
        own_weights = jnp.where(is_inside, tokens_ahead(weights, steps), 0.0)
        own_targets = tokens_ahead(targets, steps)
        total = total + cross_entropy(logits, own_targets, own_weights, chunk=chunk)["loss"]
    return total / len(ahead)


def _of_microbatch(values: Mapping[str, Array], sums: Sums) -> dict[str, Array]:
    """Return values of a whole microbatch as sums.

    The step divides by the weight, so the values are multiplied by it: zero if all tokens are
    padding.
    """
    found = dict[str, Array]()
    for name, value in values.items():
        with jax.named_scope(declared_scope(name)):
            found[name] = value * sums["weight"]
    return found


def _check_whole_microbatch(names: Sequence[str]) -> None:
    """Raise a `ConfigError` for values of a whole microbatch where a device has only a part."""
    is_part = not set(BATCH_AXES).isdisjoint(manual_axes())
    if not names or not is_part:
        return
    what = "are of all examples of a microbatch"
    problem = Problem(", ".join(names), what, fix='defer_grad_reduction="none"')
    raise ConfigError("A device cannot compute the loss of its examples alone:", [problem])


def token_inputs(batch: Any) -> tuple[Any, ...]:
    """Return the inputs of a language model: the tokens and, if a batch has them, the segments."""
    names = ["tokens"]
    if "segments" in batch:
        names.append("segments")
    return take_arrays(batch, *names)


def take_arrays(batch: Any, *names: str) -> tuple[Any, ...]:
    """Return arrays of a batch by name.

    Raises:
        ConfigError: Some are missing; the error names them all.
    """
    known = [describe_value(batch)]
    if isinstance(batch, Mapping):
        known = list(batch)
    problems = list[Problem]()
    for name in names:
        if name not in known:
            problems.append(Problem("batch", f"has no {name!r}", f"it has {known}"))
    if problems:
        raise ConfigError(_NO_BATCH, problems)
    return tuple(batch[name] for name in names)


def classification_loss(model: Model, *, train: bool = True) -> ModelLoss:
    """Return the loss of a classifier, cross-entropy over classes.

    Batches have `images`, `labels` and `weights`. `labels` and `weights` are `[batch]`, logits
    `[batch, classes]`; the step counts images as `tokens`.
    """
    return ModelLoss(
        model, lambda batch: take_arrays(batch, "images"), _class_sums, train, weighted=True
    )


def _class_sums(outputs: Outputs, batch: Any) -> Sums:
    labels, weights = take_arrays(batch, "labels", "weights")
    # as sequences of one token: [batch, 1, classes] and [batch, 1]
    return cross_entropy(outputs.logits[:, None], labels[:, None], weights[:, None])
