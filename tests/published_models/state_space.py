"""State-space mixers (Mamba 2), alone and beside attention."""

from tests.published_models.common import LLAMA, THETA

MAMBA2 = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0},
    **{"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8},
}
MIXER = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "pad_token_id": 0,
}
HYBRID_KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
GRANITE = {
    **{**LLAMA, **MIXER, "layer_types": HYBRID_KINDS, "shared_intermediate_size": 24},
    **{"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    **{"logits_scaling": 1.7, "num_local_experts": 4, "num_experts_per_tok": 2},
}
BAMBA = {**LLAMA, **MIXER, "num_hidden_layers": 6, "attn_layer_indices": [1, 4]}
BIASED_MIXER = {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}
NEMOTRON_H = {
    **{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "intermediate_size": 48, "ssm_state_size": 8, "mamba_num_heads": 8},
    **{"mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8, "moe_intermediate_size": 24},
    **{"moe_shared_expert_intermediate_size": 20, "n_routed_experts": 4},
}
FALCON_H1 = {
    **{**LLAMA, **MIXER, "mamba_d_ssm": 64, "num_hidden_layers": 3},
    **{"key_multiplier": 0.6, "attention_out_multiplier": 0.7, "ssm_out_multiplier": 1.5},
    **{"ssm_in_multiplier": 1.3, "ssm_multipliers": [0.5, 0.7, 0.9, 1.2, 0.8]},
    **{"attention_in_multiplier": 1.2, "mlp_multipliers": [0.6, 1.4]},
    **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5},
}
MODELS = {
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2-biased": (
        "Mamba2",
        {
            **{**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False},
            **{"tie_word_embeddings": True, "vocab_size": 67, "conv_kernel": 3},
            **{"num_heads": 4, "head_dim": 16, "layer_norm_epsilon": 0.1},
        },
    ),
    "mamba2-limits": ("Mamba2", {**MAMBA2, "time_step_limit": [0.3, 0.8], "n_groups": 8}),
    "granite-hybrid": ("GraniteMoeHybrid", GRANITE),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 0, "tie_word_embeddings": True, "vocab_size": 67},
    ),
    "granite-hybrid-biased": (
        "GraniteMoeHybrid",
        {
            **{**GRANITE, **BIASED_MIXER, "attention_bias": True, "num_experts_per_tok": 1},
            **{"position_embedding_type": "rope", "mamba_n_groups": 4},
            **{"layer_types": HYBRID_KINDS[::-1], "rope_parameters": {**THETA}},
        },
    ),
    "bamba": ("Bamba", BAMBA),
    "bamba-biased": (
        "Bamba",
        {
            **{**BAMBA, **BIASED_MIXER, "attention_bias": True, "mlp_bias": True},
            **{"mamba_n_groups": 2, "attn_layer_indices": [0, 3], "vocab_size": 67},
            **{"tie_word_embeddings": True, "rms_norm_eps": 0.1, "rope_parameters": {**THETA}},
        },
    ),
    "falcon-h1": ("FalconH1", FALCON_H1),
    "falcon-h1-biased": (
        "FalconH1",
        {
            **{**FALCON_H1, "mamba_rms_norm": True, "projectors_bias": True, "vocab_size": 67},
            **{"mamba_proj_bias": True, "ssm_in_multiplier": 1.0, "attention_bias": True},
            **{"attention_in_multiplier": 1.0, "mlp_bias": True, "mamba_n_groups": 2},
            **{"tie_word_embeddings": True, "rope_parameters": {**THETA}, "head_dim": 16},
        },
    ),
    "falcon-h1-gate-first": (
        "FalconH1",
        {
            **{**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            **{"mamba_d_ssm": 48, "mamba_d_head": 6, "mamba_conv_bias": False},
        },
    ),
    "nemotron-h": ("NemotronH", {**NEMOTRON_H, "hybrid_override_pattern": "M-M-*-M-M-*-"}),
    "nemotron-h-biased": (
        "NemotronH",
        {
            **{**NEMOTRON_H, "hybrid_override_pattern": "-M*M--", "use_bias": True},
            **{"use_conv_bias": False, "mlp_bias": True, "vocab_size": 67, "conv_kernel": 3},
            **{"n_groups": 1, "mamba_head_dim": 6},
        },
    ),
    "nemotron-h-limits": (
        "NemotronH",
        {**NEMOTRON_H, "hybrid_override_pattern": "MM*", "time_step_min": 0.3},
    ),
    "nemotron-3": ("NemotronH", {**NEMOTRON_H, "hybrid_override_pattern": "MEM*EMEM*E"}),
    "nemotron-3-groups": (
        "NemotronH",
        {
            **{**NEMOTRON_H, "hybrid_override_pattern": "E*M-E", "n_routed_experts": 8},
            **{"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "num_experts_per_tok": 3},
            **{"routed_scaling_factor": 1.5},
        },
    ),
}
# Elements in the tensors of the published checkpoints; a head that is the embedding is counted
# once, biases of routers are not: huggingface.co/state-spaces/{mamba2-130m,mamba2-1.3b,mamba2-2.7b},
# mistralai/Mamba-Codestral-7B-v0.1, ibm-granite/granite-4.0-h-tiny, ibm-ai-platform/Bamba-9B-v1,
# nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
PUBLISHED = {
    "bamba-9b": 9_780_235_392,
    "granite-4.0-h-tiny": 6_939_037_248,
    "mamba-codestral-7b": 7_285_403_648,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-130m": 128_989_632,
    "mamba2-2.7b": 2_702_599_680,
    "nemotron-3-nano-30b-a3b": 31_577_940_288 - 23 * 128,
}
REFUSED = {
    "bamba": {"attn_layer_indices": "1"},
    "falcon_h1": {"ssm_multipliers": [1.0]},
    "granitemoehybrid": {"mamba_expand": 3},
    "mamba2": {"time_step_limit": [0.0]},
    "nemotron_h": {"moe_latent_size": 16},
}
