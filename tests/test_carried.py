"""What goes along with a model, from a Hugging Face folder through runs and back, and what is not mixed on the way."""

import pytest

from spmd.hf.family import family_for
from spmd.hf.save import save_params
from spmd.state import init_state
from tests import tiny
from tests.command_line import run


def published(folder, **fields):
    """A Hugging Face folder of a model with some fields, and no tokenizer."""
    config = tiny.replaced(**fields)
    save_params(folder, init_state(tiny.plan(config)).params, family_for(config), config)
    return folder


@pytest.mark.parametrize("vocab", [64, 300])
def test_text_of_an_import_without_a_tokenizer(vocab, tmp_path, capsys):
    """Bytes cannot be read by a model of 64 tokens, which is said; one of 300 writes tokens that are no text."""
    out = tmp_path / "run"
    assert run("import", published(tmp_path / "hf", vocab=vocab), "--out", out, "--devices", "8") == 0
    capsys.readouterr()
    if vocab < 256:
        assert run("generate", out, "--prompt", "the", "--seed", "-1") == 2
        error = capsys.readouterr().err
        for part in ("data.tokenizer: bytes has more tokens than the model", "256 > model.vocab = 64", "seed: is -1"):
            assert part in error
    else:
        assert run("generate", out, "--prompt", "the", "--tokens", "60", "--temperature", "1", "--top-k", "0") == 0
        assert "\ufffd" in capsys.readouterr().out
