"""Rule table of a decoder, from the rows of the parts of its layers.

Megatron style: columns then rows over `tensor`, everything large over `fsdp` and `sequence`; in a
model with experts, what is no expert is split over `expert` too, and gathered over all of them.

The embedding is split by columns, not by vocabulary. Each device looks up its columns for all
tokens of its `fsdp × sequence × tensor` group, and then columns are exchanged for tokens:
activations are communicated instead of the table, and the table's gradient needs no sum over
`fsdp`. As a tied head it is split by vocabulary. Over `pipe`, where every stage of a pipeline uses embedding and head
whole, only what is stored is split.

Between the matrices, the residual stream and its norms are split over `tensor` too: by width, which
any number of tokens allows (decision 0033).
"""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.models.decoder.declared import HIDDEN, TOKENS, Axes, ParamRow, TableRows, each_axis
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.multi_token import NORMS, ahead_rows
from spmd.models.decoder.norms import norm_leaves
from spmd.sharding.batch import TOKENS as TOKEN_BATCH
from spmd.sharding.mesh import GATHERED_AXES
from spmd.sharding.rules import Replicate, Rules, replicate

_ROUTER_BIASES = "router/(logit_)?bias"
_QKV = "attention/(q|k|v)_proj/kernel"
_QKV_BIAS = "attention/(q|k|v)_proj/bias"


def decoder_rules(config: DecoderConfig, *, split_vocab: bool | None = None) -> Rules:
    """Return the rule table of a decoder.

    A single key/value head is whole on each device of `tensor`.

    Args:
        config: Shape of the decoder.
        split_vocab: Split the head over `tensor` and the stored embedding over `pipe` by
            vocabulary; otherwise every device of `tensor` computes the same logits. By default,
            where the vocabulary is even: an odd one divides over no axis above 1.

    Example:
        >>> rules = decoder_rules(DecoderConfig(tied=True))
        >>> "lm_head/kernel" in dict(rules.params)
        False
    """
    if split_vocab is None:
        split_vocab = config.vocab % 2 == 0
    fsdp: Axes = GATHERED_AXES
    lookup: Axes = ("data", "expert")
    if config.router is not None:
        fsdp = ("fsdp", "expert", "sequence")
        lookup = "data"
    rows = _embedding(config, fsdp, lookup, split_vocab=split_vocab)
    for spec in config.pattern.distinct:
        rows += spec.rows(fsdp)
        marks = ((spec.input_name, HIDDEN),)  # [batch, seq, d]
        rows += TableRows(activations=marks)
    if config.predict_ahead:
        rows += ahead_rows(fsdp)
    rows += _norms(config)
    rows += _head(config, fsdp, split_vocab=split_vocab)
    stacks: dict[str, str | None] = {"layers": "pipe"}
    # every stage of a pipeline uses them
    stacks |= dict.fromkeys([*config.first_stacks, *config.last_stacks])
    if config.predict_ahead:
        stacks["ahead"] = None
    rules = Rules(rows.params, rows.activations, stacked=stacks, batch=TOKEN_BATCH)
    if any(spec.mixer.kv_heads == 1 for spec in config.pattern.distinct):
        return replicated_kv(rules)
    return rules


def replicated_kv(rules: Rules) -> Rules:
    """Replicate key/value heads over `tensor`, for a `tensor` larger than their number.

    Each device computes all of them, and their gradients are summed over `tensor`; query heads are
    still split.
    """
    table = dict(rules.params)
    split = table[_QKV]
    assert isinstance(split, P)
    whole: dict[str, P | Replicate] = {
        "attention/(k|v)_proj/kernel": P(split[0]),
        "attention/q_proj/kernel": split,
    }
    if _QKV_BIAS in table:
        whole["attention/(k|v)_proj/bias"] = replicate("on every device, like the kernels")
        whole["attention/q_proj/bias"] = P("tensor")
    params = [rule for rule in rules.params if rule[0] not in (_QKV, _QKV_BIAS)]
    activations = []
    for name, spec in rules.activations:
        if name in ("attention_key", "attention_value"):
            spec = P(*spec[:2])
        activations.append((name, spec))
    return dataclasses.replace(rules, params=[*whole.items(), *params], activations=activations)


def _embedding(config: DecoderConfig, fsdp: Axes, lookup: Axes, *, split_vocab: bool) -> TableRows:
    """Return the rows of embedding, positions and residual stream."""
    columns = (*each_axis(fsdp), "tensor")
    stored = P("pipe", columns)  # [vocab, d]
    if not split_vocab:
        stored = P(None, (*columns, "pipe"))
    params: list[ParamRow] = [("embed/embedding", stored)]
    if config.positions:
        params.append(("positions", P(None, fsdp)))
    before = tuple(axis for axis in each_axis(fsdp) if axis != "sequence")
    # [batch, seq, …]: every column's owner sees all tokens, then two short exchanges instead of a
    # full copy
    activations = (
        ("embed_tokens", P(lookup)),
        ("embed_rows", P(lookup, None, columns)),
        ("embed_exchange", P(lookup, "sequence", before)),
        ("residual", HIDDEN),
    )
    return TableRows(tuple(params), activations)


def _head(config: DecoderConfig, fsdp: Axes, *, split_vocab: bool) -> TableRows:
    """Return the rows of the output head and the logits."""
    kernel = P((*each_axis(fsdp), "pipe"), "tensor")  # [d, vocab]
    columns = P(("pipe", "tensor"), fsdp)  # [vocab, d]
    logits = ("logits", HIDDEN)  # [batch, seq, vocab]
    params: list[ParamRow] = []
    if config.logits_bias and split_vocab:
        params.append(("logits_bias", P("tensor")))
    if config.logits_bias and not split_vocab:
        params.append(("logits_bias", replicate("an odd vocabulary divides over no axis")))
    if not split_vocab:
        kernel = P((*each_axis(fsdp), "tensor", "pipe"))
        columns = P(None, fsdp)
        logits = ("logits", TOKENS)
    if config.tied:
        return TableRows(tuple(params), (logits, ("tied_columns", columns)))
    params.append(("lm_head/kernel", kernel))
    return TableRows(tuple(params), (logits,))


def _norms(config: DecoderConfig) -> TableRows:
    """Return the row of the norms of the residual stream, and of the biases of routers."""
    leaves = norm_leaves(config.norm)
    router = config.router
    if not leaves:
        if router is None or not (router.has_choice_bias or router.logit_bias):
            return TableRows()
        return TableRows(((_ROUTER_BIASES, replicate("a number for each expert")),))
    names: dict[str, None] = {}
    for spec in config.pattern.distinct:
        names |= dict.fromkeys(spec.norm_names)
    if config.embed_norm:
        names["embed_norm"] = None
    if config.predict_ahead:
        names |= dict.fromkeys(NORMS[:-1])
    leaf = leaves[0]
    reason = f"norm {leaf}s are a few KiB"
    if len(leaves) > 1:
        leaf = f"({'|'.join(leaves)})"
        reason = "norms are a few KiB"
    pattern = f"({'|'.join([*names, 'norm'])})/{leaf}"
    if router is not None:
        pattern += f"|{_ROUTER_BIASES}"  # a number for each expert
    return TableRows(((pattern, replicate(reason)),))
