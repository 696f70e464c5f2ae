"""Requests of lm-eval as tokens, stop strings and standard errors; and what is said where it is not installed."""

import sys
from typing import Any

import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.run import lm_eval_tasks
from spmd.run.lm_eval_tasks import TaskModel, as_lm


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    own: Any = TaskModel(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        as_lm(own)
    assert "lm-eval: is not installed" in str(caught.value)
    assert "pip install 'spmd[lm-eval]'" in str(caught.value)


def test_long_requests_lose_their_beginning() -> None:
    """A continuation that is longer than the model reads has no context at all, as in lm-eval."""
    assert lm_eval_tasks._document(([1, 2], [3, 4]), longest=8) == ([1, 2, 3, 4], 2)
    assert lm_eval_tasks._document(([1, 2, 3], [4, 5]), longest=3) == ([2, 3, 4, 5], 2)
    assert lm_eval_tasks._document(([1], [2, 3, 4, 5]), longest=2) == ([3, 4, 5], 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, (0.0, 0, 1.0)),
        ({"do_sample": True}, (1.0, 0, 1.0)),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, (0.5, 3, 0.9)),
    ],
)
def test_sampling_is_greedy_unless_asked_for(
    options: dict[str, Any], expected: tuple[float, int, float]
) -> None:
    found = lm_eval_tasks._sampling(options)
    assert (found.temperature, found.top_k, found.top_p) == expected


def test_standard_errors_are_of_means() -> None:
    """Of figures that are the mean of their documents, by filter; not of a perplexity."""
    samples = [{"acc": x, "ppl": float(x), "filter": "none"} for x in (0, 1, 1, 1)]
    figures = {"acc,none": 0.75, "ppl,none": 9.0, "alias": "a task", "sample_len": 4}
    found = lm_eval_tasks._standard_errors(figures, samples)
    assert found == {"acc_stderr,none": pytest.approx(np.std([0, 1, 1, 1], ddof=1) / 2)}
    assert lm_eval_tasks._standard_errors(figures, samples[:1]) == {}


def test_new_tokens_have_four_names() -> None:
    assert lm_eval_tasks._new_tokens({"max_tokens": 4}) == 4
    assert lm_eval_tasks._new_tokens({"max_gen_toks": None, "max_completion_tokens": "7"}) == 7
    assert lm_eval_tasks._new_tokens({}) == 256


def test_stop_strings_may_be_one() -> None:
    assert lm_eval_tasks._stops({"until": "\n"}) == ["\n"]
    assert lm_eval_tasks._stops({"until": ["", "a"]}) == ["a"]
    assert lm_eval_tasks._stops({}) == []
