"""Published throughput is rebuilt and predicted; what cannot be rebuilt is a reason, never a crash."""

import dataclasses
import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import backtest
from benchmarks.backtest import (
    CLOSED_PRIORS,
    Prediction,
    fit_closed,
    leave_one_out,
    mean_baseline_error,
    mean_error,
    predict_closed,
    rank,
    spread,
)
from benchmarks.backtest_compile import compile_rows, describe, engine_digest, make_config
from benchmarks.published_rows import ROWS as PUBLISHED
from benchmarks.published_rows import Rebuilt, read_rows, rebuild
from spmd.chips import CHIPS, KINDS, ClosedRates
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


def fit_gpu(jobs: Sequence[Rebuilt]) -> ClosedRates:
    return fit_closed(jobs, CLOSED_PRIORS["cuda"])


def test_rows_are_predicted_from_another_family() -> None:
    """Each within 10 %, better than one constant MFU, in the published order; rates are fitted on the other model."""
    jobs = [job(row) for row in ROWS]
    rows = leave_one_out(jobs, predict_closed, lambda known, held: fit_gpu(known))
    assert max(row.error for row in rows) < 0.1
    assert mean_error(rows) < 0.5 * mean_baseline_error(rows)
    assert rank(rows) == pytest.approx({"mpt-760m": 1.0, "mpt-3b": 1.0})
    reversed_rows = [dataclasses.replace(row, tokens=-row.tokens) for row in rows]
    assert rank(reversed_rows) == pytest.approx({"mpt-760m": -1.0, "mpt-3b": -1.0})


def test_no_fit_knows_the_family_that_it_predicts() -> None:
    """Nor do the rows of other chips that it starts from; a chip's only family is fitted on itself."""
    told = []

    def make_rates(known, held):
        told.append(({backtest.family(job) for job in known}, held))
        return CLOSED_PRIORS["cuda"]

    jobs = [job(row) for row in ROWS]
    leave_one_out(jobs, predict_closed, make_rates)
    assert told == [({"mpt-760m"}, "mpt-3b"), ({"mpt-3b"}, "mpt-760m")]
    told.clear()
    leave_one_out(jobs[:2], predict_closed, make_rates)
    assert told == [({"mpt-760m"}, "")]
    # GB200s have no dense rows, and start from those of H100s
    h100s = [{**row, "chip": "H100-SXM"} for row in ROWS]
    narrow = {**ROWS[0], "chip": "GB200", "mesh": {"fsdp": 8}, "precision": "fp8"}
    other = {**narrow, "model": "other"}
    (first, _), (second, _) = (
        backtest.run([*rows, narrow, other], None)[0]["gb200"].predictions
        for rows in (h100s, [*h100s[5:], *({**row, "seq": 64} for row in h100s[:5])])
    )
    assert first.tokens == second.tokens


def test_half_the_matmul_efficiency_misses() -> None:
    """The control: with the fitted rates but for one, no row is within 10 %."""
    jobs = [job(row) for row in ROWS]
    rates = fit_gpu(jobs)
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
    assert list(found.kinds) == ["dense"]
    speeds = [row.tokens for row in found.predictions]
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
    assert str(found.topology) == "a100-40gb:1x8"
    assert found.network.hardware.memory_bandwidth == 1555e9  # of 40 GB
    assert (found.published, found.kind) == (13914, "dense")
    assert (found.work.head_width, found.work.is_gated) == (128, False)
    assert found.topology.chip.attention_block == 128
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
    ({"precision": "fp8 or bf16"}, r"one of two"),
    ({"extra": {"global_head_dim": 512}}, r"heads of several widths"),
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
    assert results["a100-40gb"].built == 1


def test_rows_of_8_bits_change_no_dense_rate() -> None:
    """Their large products take half the time of bfloat16's on H100s; rates of others are fitted without them."""
    h100 = {**ROWS[0], "chip": "H100-SXM"}
    narrow = {**h100, "precision": "amp_fp8"}
    assert (job(h100).work.quantized, job(narrow).work.quantized) == ({}, {"float8": 1.0})
    rates = dataclasses.replace(CLOSED_PRIORS["cuda"], half=1e-9, eight_bits=1.0)
    wide, halved = (
        closed_form(job(row).work, job(row).network, rates)["matmuls"] for row in (h100, narrow)
    )
    share = job(h100).work.layer_params / (job(h100).work.layer_params + job(h100).work.head_params)
    assert halved == pytest.approx(wide * (1 - share / 2))
    dense = [job(h100), job(h100, seq=4096)]
    alone, both = fit_gpu(dense), fit_gpu([*dense, job(narrow)])
    assert alone.eight_bits != both.eight_bits
    assert dataclasses.replace(both, eight_bits=alone.eight_bits) == alone
    results, reasons = backtest.run([h100, {**h100, "seq": 4096}, narrow], None)
    assert reasons == {}
    assert {kind: found.rows for kind, found in results["h100"].kinds.items()} == {
        "dense": 2,
        "8 bits": 1,
    }
    rack = job({**narrow, "chip": "GB200", "chips": 64, "mesh": {"fsdp": 64}})
    assert (str(rack.topology), rack.network.extent(range(64)).parts) == ("gb200:16x4", 1)


# DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 4.2: 671B parameters, of
# which a token meets 37B.
DEEPSEEK = {
    **{"model": "deepseek3-671b", "layers": 61, "d_model": 7168, "d_ff": 18432, "heads": 128},
    **{"kv_heads": 128, "head_dim": 192, "vocab": 129280, "seq": 4096, "per_device_batch": 8},
    "extra": {
        **{"experts": 256, "experts_per_token": 8, "shared_experts": 1, "moe_d_ff": 2048},
        **{"dense_layers": 3, "attention": "MLA q_lora 1536 kv_lora 512 nope 128 rope 64 v 128"},
    },
    **{"chip": "tpu7x", "chips": 128, "mesh": {"fsdp": 256}, "remat": "full", "precision": "bf16"},
    "tokens_per_s_per_chip": 2425.75,
}


def test_a_model_with_experts_and_latent_attention_is_counted() -> None:
    """As its report says, to 1 %; routed experts are counted apart."""
    work = job(DEEPSEEK).work
    assert work.params == pytest.approx(671e9, rel=0.01)
    embedding = 7168 * 129280
    assert work.layer_params + work.head_params + embedding == pytest.approx(37.5e9, rel=0.02)
    assert work.expert_params == 58 * 8 * 3 * 7168 * 2048
    assert job(DEEPSEEK).kind == "experts"


def test_the_range_grows_where_few_families_show_it() -> None:
    """Of one family 30 % at least, of three the largest error and half as much again, then a rank."""
    rows = []
    for number, name in enumerate("abcdefghijk"):
        found = job({**ROWS[0], "model": name})
        rows.append(Prediction(found, found.published * (1 + 0.01 * number), found.published))
    assert spread(rows[:1]) == 0.3
    assert spread(rows[8:10]) == pytest.approx(1.5 * 0.09)
    assert spread(rows) == pytest.approx(0.1)
    assert spread(rows[:4]) == 0.05  # published tables are not more exact


BARS = {"dense": 0.06, "8 bits": 0.16, "pipelines": 0.06, "experts": 0.35}
"""Kind → largest mean error with the shipped rates on any chip."""


@pytest.fixture(scope="module")
def shipped():
    return backtest.run(read_rows(str(PUBLISHED)), None, shipped=True)


def test_published_rows_are_predicted_by_the_shipped_rates(shipped) -> None:
    """At least 95 % are built; ranges hold; tensor parallelism, experts and 8 bits are in the file."""
    results, reasons = shipped
    rows = read_rows(str(PUBLISHED))
    assert all(row["source"] for row in rows)
    assert len(reasons) < 0.05 * len(rows)
    for chip, result in results.items():
        for kind, found in result.kinds.items():
            if kind in KINDS:
                assert found.mape < BARS[kind], (chip, kind, found.mape)
                assert found.held is not None, (chip, kind)
                assert found.held >= 0.85, (chip, kind, found.held)
    kinds = {kind for result in results.values() for kind in result.kinds}
    assert kinds == {*KINDS, "4 bits"}


def test_collectives_over_tensor_that_nothing_hides_miss(shipped) -> None:
    """The control: a 128B model over tensor=16 of v5e is too slow by more than the range."""
    rates = CHIPS["v5e"].closed
    assert rates is not None
    exposing = dataclasses.replace(rates, exposed_tensor=1.0)
    rows = shipped[0]["v5e"].predictions
    jobs = [row.job for row in rows if row.job.work.mesh["tensor"] == 16]
    assert len(jobs) == 6
    for of in jobs:
        assert abs(predict_closed(of, rates) / of.published - 1) < rates.spread
        assert predict_closed(of, exposing) / of.published - 1 < -rates.spread


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
