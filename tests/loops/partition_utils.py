"""Partition tables for `re.search`, as training scripts use them: the first match wins, nothing is checked."""

import functools
import re

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as PS


def match_partition_rules(rules, tree):
    """The tree with the spec of the first rule found in the path of each array; scalars are whole."""

    def spec_of(path, leaf):
        if leaf.size <= 1:
            return PS()
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name):
                return spec
        raise ValueError(f"no partition rule for {name}")

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def as_shardings(mesh, specs):
    """The tree of specs with their shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def make_shard_and_gather_fns(shardings):
    """Two trees of functions: to the devices as sharded, and whole onto the host."""

    def shard_fn(sharding):
        return functools.partial(jax.device_put, device=sharding)

    gather_fns = jax.tree.map(lambda _: jax.device_get, shardings)
    return jax.tree.map(shard_fn, shardings), gather_fns
