"""The parameters with an adapter, and its rank."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from spmd import tree
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.lora.config import TITLE, LoRAConfig, rank_rows
from spmd.model_interface.model import Model, abstract_key
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.rules import Rules, first_path, matches


class Target(NamedTuple):
    """A parameter with an adapter: its shape, with stacked dimensions, and the adapter's rank."""

    shape: tuple[int, ...]
    rank: int


def find_targets(model: Model, lora: LoRAConfig, rules: Rules) -> dict[str, Target]:
    """Return the parameters with an adapter, by path.

    Raises:
        ConfigError: A pattern matches no parameter, one that is no matrix, or one of a lower rank;
            or a row of ranks matches no target.
    """
    rules = rules.with_recorded(model.info().stacks)
    shapes = dict[str, tuple[int, ...]]()
    names = list[str]()
    for path, leaf in tree.flatten(jax.eval_shape(model.init, abstract_key())).items():
        shapes[path] = tuple(leaf.shape)
        names.append(rules.layer_path(path)[0])
    problems = list[Problem]()
    named_by = dict[str, str]()  # path → the setting that names it
    for index, pattern in enumerate(lora.targets):
        where = f"lora.targets[{index}]"
        targets = [path for path in shapes if matches(pattern, path, rules.stacks)]
        named_by |= dict.fromkeys(targets, where)
        if not targets:
            fix = first_path(pattern, model.info().tied, rules.stacks)
            fix = fix or did_you_mean(pattern, names)
            problems.append(Problem(where, f"{pattern!r} matches no parameter", fix=fix))
    ranks = _ranks(lora, list(named_by), rules, problems)
    found = dict[str, Target]()
    for path, where in named_by.items():
        found[path] = Target(shapes[path], ranks[path])
        stacked = dims_of(path, rules.stacks)
        is_default = ranks[path] == lora.rank
        problems += _target_problems(where, path, found[path], stacked, is_default=is_default)
    if problems:
        raise ConfigError(TITLE, problems)
    return found


def _ranks(
    lora: LoRAConfig, paths: Sequence[str], rules: Rules, problems: list[Problem]
) -> dict[str, int]:
    """Return the rank of each target; report rows without one of their own."""
    ranks = dict[str, int]()
    for pattern, rank in rank_rows(lora.ranks):
        new = []
        for path in paths:
            if path not in ranks and matches(pattern, path, rules.stacks):
                new.append(path)
        ranks |= dict.fromkeys(new, rank)
        if not new:
            names = [rules.layer_path(path)[0] for path in paths]
            what = "matches no target that no row before it matches"
            fix = did_you_mean(pattern, names)
            problems.append(Problem(f"lora.ranks, row '{pattern}={rank}'", what, fix=fix))
    for path in paths:
        ranks.setdefault(path, lora.rank)
    return ranks


def _target_problems(
    where: str, path: str, target: Target, stacked: Sequence[int], *, is_default: bool
) -> list[Problem]:
    """Return a problem if a parameter cannot have an adapter."""
    shape, rank = target
    if list(stacked) != list(range(len(stacked))):
        what = f"matches {path}, which is stacked along dimension {stacked[0]}"
        return [Problem(where, what, f"{shape}", "stack along dimension 0 for adapters")]
    if len(shape) - len(stacked) < 2:
        what = f"matches {path}, which is not a matrix"
        return [Problem(where, what, f"{shape}", "name kernels only")]
    least = min(shape[-2:])
    if rank > least:
        what = f"is above the rank of {path}"
        setting = "lora.rank" if is_default else "lora.ranks"
        return [Problem(setting, what, f"{rank} > {least} of {shape}", f"at most {least}")]
    return []
