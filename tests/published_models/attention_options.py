"""Softmax attention with sinks, chunks, values of their own width, or factors by position."""

from tests.published_models.common import LLAMA, MIXED, PLAIN, THETA

GPT_OSS = {**LLAMA, "head_dim": 16, "sliding_window": 5, "num_local_experts": 4}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA},
    **{"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
}
MODELS = {
    "gpt-oss": ("GptOss", {**GPT_OSS, "num_experts_per_tok": 2, "rope_parameters": YARN}),
    "gpt-oss-plain": (
        "GptOss",
        {
            **{**MIXED, "vocab_size": 67, "num_local_experts": 4, "num_experts_per_tok": 1},
            **{"attention_bias": False, "tie_word_embeddings": True, "rope_parameters": PLAIN},
        },
    ),
    "gpt-oss-default-positions": ("GptOss", {**GPT_OSS, "num_experts_per_tok": 3, "head_dim": 8}),
}
# huggingface.co/openai/{gpt-oss-20b,gpt-oss-120b}.
PUBLISHED = {"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}
REFUSED = {"gpt_oss": {"swiglu_limit": 5.0}}
