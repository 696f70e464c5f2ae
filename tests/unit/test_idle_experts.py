"""Experts that no token chooses."""

import numpy as np

from spmd.observe.idle_experts import IdleExperts


def test_an_idle_expert_is_named_once_until_it_is_chosen() -> None:
    """After as many steps as were asked for, with its layer; not one step before, and again only after a token."""
    said: list[str] = []
    watch = IdleExperts(said.append, steps=3)
    watch.on_metrics(1, {"loss": 1.0})
    for step, load in enumerate(
        [[0, 1], [0, 0], [0, 0], [0, 0], [1, 0], [0, 1], [0, 1], [0, 1]], 1
    ):
        watch.on_metrics(step, {"arrays": {"expert_load": np.array([[1, 1], load])}})
    assert [line.partition(":")[0] for line in said] == [
        f"step {step}   no token in 3 steps for expert {expert} of layer 1"
        for step, expert in ((3, 0), (4, 1), (8, 0))
    ]
    watch = IdleExperts(said.append, steps=1)
    watch.on_metrics(1, {"arrays": {"expert_load": np.zeros((2, 8))}})
    assert "7 of layer 0 and 8 more: raise" in said[-1]
