"""Published throughput is rebuilt and predicted; what cannot be rebuilt is a reason, never a crash."""

import dataclasses
import json
import re
import subprocess
from typing import Any

import pytest

from benchmarks import backtest
from benchmarks.backtest import CLOSED_PRIORS, fit, leave_one_out, predict_closed, rank
from benchmarks.backtest_compile import compile_rows, describe, engine_digest, make_config
from benchmarks.published_rows import Rebuilt, read_rows, rebuild
from spmd.chips import Rates
from spmd.errors import ConfigError
from spmd.step_time.closed_form import closed_form

# mosaicml/llm-foundry, scripts/train/benchmarking/README.md, A100 40GB: tokens/s of one GPU.
MPT: dict[str, Any] = {
    **{"chip": "A100-SXM-40GB", "chips": 8, "mesh": {"fsdp": 8}, "vocab": 50368, "head_dim": 128},
    **{
        "remat": "none",
        "precision": "bf16 PURE",
        "extra": {"mlp": "gelu, 2 matrices", "tied_embeddings": True},
    },
}
SMALL = {
    "model": "mpt-760m",
    "layers": 24,
    "d_model": 1536,
    "d_ff": 6144,
    "heads": 12,
    "kv_heads": 12,
    "grad_accum": 4,
}
LARGE = {
    "model": "mpt-3b",
    "layers": 32,
    "d_model": 2560,
    "d_ff": 10240,
    "heads": 20,
    "kv_heads": 20,
    "grad_accum": 8,
}
FIGURES = {  # tokens, sequences on each GPU, tokens/s
    "mpt-760m": (
        SMALL,
        [
            (16384, 1, 13914),
            (8192, 3, 20106),
            (4096, 6, 25863),
            (2048, 12, 30173),
            (1024, 24, 33422),
        ],
    ),
    "mpt-3b": (
        LARGE,
        [(8192, 1, 7149), (4096, 2, 8777), (2048, 5, 10065), (1024, 10, 10731), (512, 20, 11324)],
    ),
}
ROWS = [
    {
        **MPT,
        **shape,
        "seq": tokens,
        "per_device_batch": batch,
        "tokens_per_s_per_chip": float(speed),
    }
    for shape, figures in FIGURES.values()
    for tokens, batch, speed in figures
]
# AI-Hypercomputer/maxtext@76bd53b0f, MaxText/configs/v5e/README.md: TFLOP/s, by its convention as
# tokens/s of one chip.
MAXTEXT: dict[str, Any] = {
    **{
        "model": "maxtext-16b",
        "chip": "v5e",
        "layers": 32,
        "d_model": 5120,
        "d_ff": 32768,
        "heads": 32,
    },
    **{
        "kv_heads": 32,
        "head_dim": 256,
        "vocab": 32768,
        "seq": 2048,
        "per_device_batch": 6,
        "grad_accum": None,
    },
    **{"remat": "full", "precision": "bf16 compute, f32 params", "notes": "1x v5e-256"},
    **{"extra": {"mlp": "relu, 2 matrices", "tied_embeddings": True}},
}
SLICES = [
    {
        **MAXTEXT,
        "chips": 256 * n,
        "mesh": {"dcn_data": n, "fsdp": 256},
        "derived_tokens_per_s_per_chip": speed,
    }
    for n, speed in ((1, 1189.71), (2, 1159.97), (8, 1140.14), (32, 1070.74))
]


def job(row: dict[str, Any], **changes: Any) -> Rebuilt:
    found = rebuild({**row, **changes})
    assert isinstance(found, Rebuilt), found
    return found


def test_rows_are_predicted_from_another_family() -> None:
    """Each within 10 %, better than one constant MFU, in the published order; rates are fitted on the other model."""
    jobs = [job(row) for row in ROWS]
    predicted, baseline = leave_one_out(jobs, predict_closed, CLOSED_PRIORS["cuda"])
    wrong = [abs(p / job.published - 1) for job, p in zip(jobs, predicted, strict=True)]
    assert max(wrong) < 0.1
    assert backtest.error(jobs, predicted) < 0.5 * backtest.error(jobs, baseline)
    assert rank(jobs, predicted) == pytest.approx({"mpt-760m": 1.0, "mpt-3b": 1.0})
    assert rank(jobs, [-p for p in predicted]) == pytest.approx({"mpt-760m": -1.0, "mpt-3b": -1.0})


def test_other_chips_say_what_rows_of_one_chip_do_not() -> None:
    """A fit is drawn to the rates of other chips, but not to their rows of the model that is predicted."""
    jobs, slower = ([job(row) for row in ROWS] for _ in range(2))

    def predict(of: Rebuilt, rates: Rates) -> float:
        return 1.5 * of.published / rates.matmul

    alone, _ = leave_one_out(jobs[:1], predict, Rates())
    held, _ = leave_one_out(jobs[:1], predict, Rates(), slower[:5])  # all of this model
    drawn, _ = leave_one_out(jobs[:1], predict, Rates(), slower[5:])
    assert held == pytest.approx(alone)
    assert 1 < drawn[0] / jobs[0].published < 0.99 * alone[0] / jobs[0].published


def test_half_the_matmul_efficiency_misses() -> None:
    """The control: with the fitted rates but for one, no row is within 10 %."""
    jobs = [job(row) for row in ROWS]
    rates = fit(jobs, predict_closed, CLOSED_PRIORS["cuda"])
    slow = dataclasses.replace(rates, matmul=rates.matmul / 2)
    assert all(abs(predict_closed(job, rates) / job.published - 1) < 0.1 for job in jobs)
    assert not any(abs(predict_closed(job, slow) / job.published - 1) < 0.1 for job in jobs)


def test_slices_are_predicted() -> None:
    """Of one family, rates are fitted on it; more slices are slower, by published and predicted figures."""
    results, reasons = backtest.run(SLICES, None)
    assert reasons == {}
    (found,) = results.values()
    assert (found.rows, found.built) == (4, 4)
    assert found.mape < 0.1
    assert found.mape < found.baseline
    speeds = [p for _, p in found.predictions]
    assert speeds == sorted(speeds, reverse=True)
    (line,) = found.slopes
    assert line.startswith("maxtext-16b, slices 1 → 32: -10.0%, predicted -")


def test_a_row_as_a_job() -> None:
    """Shapes by hand: two matrices in an MLP, tied embeddings, microbatches, one slice for each `dcn_data`."""
    found = job(ROWS[0])
    kernels = 24 * (4 * 1536 * 1536 + 2 * 1536 * 6144)
    assert (found.work.layer_params, found.work.head_params) == (kernels, 1536 * 50368)
    assert found.work.params == kernels + 1536 * 50368
    assert (found.work.batch, found.work.microbatches, found.work.keys) == (1 * 8 * 4, 4, 8192)
    assert (found.work.reduced_bytes, found.work.is_fused) == (2, False)
    assert str(found.topology) == "a100:1x8"
    assert found.network.hardware.memory_bandwidth == 1555e9  # of 40 GB
    assert (found.published, found.is_dense) == (13914, True)
    slices = job(SLICES[1])
    assert str(slices.topology) == "2xv5e:16x16"
    assert (slices.work.mesh["data"], slices.work.mesh["fsdp"], slices.slices["data"]) == (
        2,
        256,
        2,
    )
    assert slices.work.recomputed == pytest.approx(
        1 - 5120 * 32768 / (4 * 5120 * 8192 + 2 * 5120 * 32768)
    )
    assert slices.work.recomputes_attention
    assert slices.tokens_per_second(2.0) == slices.work.tokens / 2 / 512


def test_a_row_as_a_config() -> None:
    """What is compiled for slices is the program of one, with the row's MLP, windows and head."""
    local = {
        **MAXTEXT["extra"],
        "sliding_window": 512,
        "sliding_pattern": "5 local : 1 global",
        "mlp": "geglu",
    }
    row = {**SLICES[1], "layers": 36, "extra": local}
    about = describe(job(row))
    assert json.loads(json.dumps(about))["topology"] == "v5e:16x16"
    config = make_config(json.loads(json.dumps(about)))
    assert config.model.windows == (512,) * 5 + (0,)
    assert (config.model.tied, config.model.head_dim) == (True, 256)
    assert config.model.group[0].mlp.activation == "gelu_tanh"
    assert (config.data.batch, config.mesh.fsdp, config.mesh.data) == (6 * 256, 256, 1)
    assert job(row).work.keys == pytest.approx((5 * (512 - 512**2 / 4096) + 1024) / 6)
    assert describe(job(SLICES[1])) == describe(job(SLICES[3]))


@pytest.mark.parametrize(("code", "is_kept"), [(1, True), (-6, True), (-9, False), (-2, False)])
def test_a_row_whose_compiler_was_stopped_is_compiled_again(
    code, is_kept, tmp_path, monkeypatch
) -> None:
    """What the compiler refuses, or crashes at, is kept; a process that was killed or interrupted says nothing."""
    done = subprocess.CompletedProcess([], code, "", "too large\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    programs, failed = compile_rows({7: job(SLICES[0])}, str(tmp_path))
    assert programs == {}
    assert failed == {
        7: "not compiled: "
        + ("too large" if is_kept else "stopped, perhaps for its memory: --workers 1")
    }
    assert len(list(tmp_path.iterdir())) == is_kept


def test_programs_of_other_sources_are_told_apart(tmp_path, monkeypatch) -> None:
    """The digest is of everything that makes a step, behind links too, and not of what reads programs."""
    package, models = tmp_path / "spmd", tmp_path / "models"
    for folder in (package / "plan", package / "step_time", models):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("x = 1")
    (package / "models").symlink_to(models)
    monkeypatch.setattr("spmd.__file__", str(package / "__init__.py"))
    digests = [engine_digest()]
    for folder in (package / "step_time", package / "plan", models):
        (folder / "a.py").write_text("x = 2")
        digests.append(engine_digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


REASONS = [
    ({"precision": "NVFP4"}, r"precision NVFP4: no recipe of 4 bits"),
    ({"precision": "fp8 or bf16"}, r"one of two"),
    ({"extra": {"attention": "MLA"}}, r"latent attention"),
    ({"extra": {"shared_experts": 1}}, r"shared experts"),
    ({"notes": "not a plain transformer: it is something else"}, r"no plain transformer"),
    ({"chip": "trainium2"}, r"no chip 'trainium2'"),
    ({"mesh": {"fsdp": 4}}, r"mesh .*fsdp.* on 8 A100-SXM-40GB: "),
    ({"mesh": {"ring": 8}}, r"ring"),
    ({"chip": "v5p", "chips": 100}, r"no slice of 100 chips"),
    ({"chip": "v5e", "chips": 100}, r"100"),
    ({"remat": "sometimes"}, r"remat 'sometimes': no such policy"),
]


@pytest.mark.parametrize(
    ("changes", "reason"), REASONS, ids=[f"{next(iter(c.values()))}"[:24] for c, _ in REASONS]
)
def test_what_is_not_rebuilt_has_a_reason(changes, reason) -> None:
    """Four bits, unknown chips, other meshes and other models are listed, and do not stop the rest."""
    found = rebuild({**ROWS[0], **changes})
    assert isinstance(found, str)
    assert re.search(reason, found)
    results, reasons = backtest.run([{**ROWS[0], **changes}, ROWS[1]], None)
    assert reasons == {0: found}
    assert results["A100-SXM-40GB"].built == 1


def test_rows_of_8_bits_are_apart() -> None:
    """Their products take half the time of bfloat16's on H100s, and they are no rows of their chip's group."""
    h100 = {**ROWS[0], "chip": "H100-SXM"}
    narrow = {**h100, "precision": "fp8 rowwise torch.compile"}
    assert (job(h100).work.quantized, job(narrow).work.quantized) == ({}, {"float8": 1.0})
    rates = backtest.CLOSED_PRIORS["cuda"]
    wide, halved = (
        closed_form(job(row).work, job(row).network, rates)["matmuls"] for row in (h100, narrow)
    )
    share = job(h100).work.layer_params / (job(h100).work.layer_params + job(h100).work.head_params)
    assert halved == pytest.approx(wide * (1 - share / 2))
    results, reasons = backtest.run([h100, {**h100, "seq": 4096}, narrow], None)
    assert reasons == {}
    assert {name: found.built for name, found in results.items()} == {
        "H100-SXM": 2,
        "H100-SXM, 8 bits": 1,
    }
    alone, _ = backtest.run([h100, {**h100, "seq": 4096}], None)
    assert results["H100-SXM"].mape == alone["H100-SXM"].mape
    rack = job({**narrow, "chip": "GB200", "precision": "MXFP8"})
    assert (rack.group, rack.network.hardware.network) == (
        "GB200, 8 bits",
        rack.network.hardware.link,
    )


def test_rows_that_lack_inputs_are_one_error(tmp_path) -> None:
    """With a line for each row, and all that it lacks; complete rows are read."""
    file = tmp_path / "rows.json"
    bare = {
        name: value
        for name, value in ROWS[0].items()
        if name not in ("per_device_batch", "tokens_per_s_per_chip")
    }
    file.write_text(json.dumps([ROWS[1], {**ROWS[0], "layers": None}, bare]))
    with pytest.raises(ConfigError) as caught:
        read_rows(str(file))
    lines = [str(problem).partition("\n")[0] for problem in caught.value.problems]
    lacks = (
        "per_device_batch or global_batch, tokens_per_s_per_chip or derived_tokens_per_s_per_chip"
    )
    assert lines == [
        "row 1 (mpt-760m on A100-SXM-40GB): lacks layers",
        f"row 2 (mpt-760m on A100-SXM-40GB): lacks {lacks}",
    ]
    file.write_text(json.dumps(ROWS))
    assert read_rows(str(file)) == ROWS


@pytest.mark.parametrize("text", [None, "{", '{"rows": []}', "[1]"])
def test_a_file_that_is_no_list_of_rows(text, tmp_path) -> None:
    """Absent, no JSON, or another object: an error with its name."""
    file = tmp_path / "rows.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.json"):
        read_rows(str(file))
