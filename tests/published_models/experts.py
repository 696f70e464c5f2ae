"""Decoders with experts: Qwen, OLMoE, Granite, ERNIE, Hunyuan, DBRX, Cohere."""

from tests.published_models.common import LLAMA, THETA

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2 = {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 40}
MODELS = {
    "qwen3-moe": ("Qwen3Moe", {**LLAMA, **EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-biased": (
        "Qwen3Moe",
        {
            **{**LLAMA, **EXPERTS, "head_dim": 16, "attention_bias": True, "vocab_size": 67},
            **{"mlp_only_layers": [0, 2], "tie_word_embeddings": True},
        },
    ),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {
            **{**LLAMA, **EXPERTS, "use_sliding_window": True, "sliding_window": 4},
            **{"decoder_sparse_step": 2, "num_experts_per_tok": 1, "rope_parameters": THETA},
        },
    ),
    "qwen2-moe": ("Qwen2Moe", QWEN2),
    "qwen2-moe-plain": (
        "Qwen2Moe",
        {
            **{**QWEN2, "qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
            **{"decoder_sparse_step": 2, "num_key_value_heads": 4},
        },
    ),
    "qwen2-moe-windows": (
        "Qwen2Moe",
        {
            **{**QWEN2, "use_sliding_window": True, "sliding_window": 4, "mlp_only_layers": [0, 1]},
            **{"max_window_layers": 3, "num_hidden_layers": 5},
        },
    ),
}
# Elements in the tensors of the published checkpoints: huggingface.co/Qwen/{Qwen1.5-MoE-A2.7B,
# Qwen3-30B-A3B,Qwen3-235B-A22B}.
PUBLISHED = {
    "qwen1.5-moe": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
REFUSED = {
    "qwen2_moe": {"mlp_only_layers": [0, 1]},
    "qwen3_moe": {"decoder_sparse_step": 3},
}
