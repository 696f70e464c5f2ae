"""Recurrent token mixers and short convolutions, beside layers with attention."""

from tests.published_models.common import LLAMA, PLAIN, THETA

LFM2 = {
    **{**LLAMA, "num_hidden_layers": 5, "block_auto_adjust_ff_dim": False},
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}
LFM2_MOE = {
    **{**LLAMA, "num_hidden_layers": 5, "layer_types": LFM2["layer_types"], "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1},
}
LFM3_KINDS = ["conv", "conv", "full_attention", "conv", "sliding_attention"]
LFM3 = {
    **{**LLAMA, "num_hidden_layers": 5, "head_dim": 8, "pad_token_id": 0, "sliding_window": 4},
    "layer_types": LFM3_KINDS,
}
# The norm of outputs divides by their size, near 0 where a query is orthogonal to keys: with a small
# epsilon, float32 differs by 3e-4 from float64 in `transformers` too.
QWEN3_5 = {
    **{**LLAMA, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 6},
    "rms_norm_eps": 0.01,
}
# `transformers` 5.24 writes the convolution as three equal parts (its reverse of `Concatenate`), so
# heads of values must be as wide as those of keys here; published files have the true sizes.
OLMO_HYBRID = {**LLAMA, "num_hidden_layers": 2, "linear_value_head_dim": 6, "pad_token_id": 0}
SPARSE = {
    **{**QWEN3_5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 20,
}
IMAGES = {
    **{"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
    **{"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
}
WITH_IMAGES = {
    "Qwen3_5": {"text_config": QWEN3_5, "vision_config": IMAGES},
    "Qwen3_5Moe": {"text_config": SPARSE, "vision_config": IMAGES},
}
"""Class of a model of images and text → its fields."""
MODELS = {
    "lfm2": ("Lfm2", LFM2),
    "lfm2-biased": (
        "Lfm2",
        {
            **{**LFM2, "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
            **{"block_auto_adjust_ff_dim": True, "block_multiple_of": 20, "vocab_size": 67},
        },
    ),
    "lfm2-conv": ("Lfm2", {**LFM2, "layer_types": ["full_attention", *["conv"] * 4]}),
    "lfm2-moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2-moe-unbiased": (
        "Lfm2Moe",
        {
            **{**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "vocab_size": 67},
            **{"routed_scaling_factor": 1.5, "num_dense_layers": 0, "num_experts_per_tok": 1},
        },
    ),
    "lfm2-moe-dense": ("Lfm2Moe", {**LFM2_MOE, "num_dense_layers": 3, "conv_bias": True}),
    "lfm3": ("Lfm3", LFM3),
    "lfm3-plain": (
        "Lfm3",
        {
            **{**LFM3, "use_sandwich_norm": False, "use_attention_gate": False, "vocab_size": 67},
            **{"attention_bias": True, "conv_bias": True, "conv_L_cache": 3, "head_dim": 16},
            **{"tie_word_embeddings": False, "layer_types": LFM3_KINDS[::-1]},
            "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", OLMO_HYBRID),
    "olmo-hybrid-plain": (
        "OlmoHybrid",
        {
            **{**OLMO_HYBRID, "attention_bias": True, "linear_allow_neg_eigval": False},
            **{"vocab_size": 67, "num_hidden_layers": 3, "linear_conv_kernel_dim": 3},
            **{"layer_types": ["full_attention", *["linear_attention"] * 2]},
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "qwen3.5": ("Qwen3_5", QWEN3_5),
    "qwen3.5-biased": (
        "Qwen3_5",
        {
            **{**QWEN3_5, "num_hidden_layers": 3, "attention_bias": True, "vocab_size": 67},
            **{"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            **{"tie_word_embeddings": True, "linear_conv_kernel_dim": 2},
            "rope_parameters": {
                **{"rope_type": "default", **THETA, "partial_rotary_factor": 0.5},
                **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
        },
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", SPARSE),
    "qwen3-next": ("Qwen3Next", SPARSE),
    "qwen3-next-dense": (
        "Qwen3Next",
        {
            **{**SPARSE, "mlp_only_layers": [0, 2], "norm_topk_prob": False, "vocab_size": 67},
            **{"num_hidden_layers": 5, "attention_bias": True, "num_experts_per_tok": 1},
            **{"full_attention_interval": 2, "tie_word_embeddings": True},
        },
    ),
}
# Elements in the tensors of the published checkpoints; a head that is the embedding is counted
# once, biases of routers and multi-token prediction are not: huggingface.co/LiquidAI/{LFM2-350M,
# LFM2-700M,LFM2-1.2B,LFM2-8B-A1B}, huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.
PUBLISHED = {
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856,
    "qwen3-next-80b-a3b": 79_674_391_296,
}
REFUSED = {
    "lfm2": {"layer_types": ["full_attention"] * 5},
    "lfm2_moe": {"num_dense_layers": 5},
    "lfm3": {"use_attention_gate": 1},
    "olmo_hybrid": {"layer_types": ["linear_attention"] * 4},
    "qwen3_5_moe_text": {"hidden_act": "gelu"},
    "qwen3_next": {"layer_types": ["full_attention"] * 4},
    "qwen3_5_text": {"hidden_act": "gelu"},
}
