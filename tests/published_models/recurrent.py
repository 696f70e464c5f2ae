"""Recurrent token mixers and short convolutions, beside layers with attention."""

from tests.published_models.common import LLAMA, THETA

LFM2 = {
    **{**LLAMA, "num_hidden_layers": 5, "block_auto_adjust_ff_dim": False},
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}
QWEN3_5 = {
    **{**LLAMA, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 6},
}
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
    "qwen3.5": ("Qwen3_5", QWEN3_5),
    "qwen3.5-biased": (
        "Qwen3_5",
        {
            **{**QWEN3_5, "num_hidden_layers": 5, "attention_bias": True, "vocab_size": 67},
            **{"layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]},
            **{"tie_word_embeddings": True, "linear_conv_kernel_dim": 2},
            "rope_parameters": {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5},
        },
    ),
}
# Elements in the tensors of the published checkpoints; a head that is the embedding is counted
# once: huggingface.co/LiquidAI/{LFM2-350M,LFM2-700M,LFM2-1.2B}.
PUBLISHED = {
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
}
REFUSED = {
    "lfm2": {"layer_types": ["full_attention"] * 5},
    "qwen3_5_text": {"hidden_act": "gelu"},
}
