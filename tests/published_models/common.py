"""Fields of config.json of small models."""

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
SCALED = {
    "rope_theta": 300.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
THETA = {"rope_theta": 300.0}
PLAIN = {"rope_type": "default", **THETA}
LAYERS8 = {**LLAMA, "num_hidden_layers": 8, "pad_token_id": 0}
WINDOWED = {**LAYERS8, "sliding_window": 4}
FULL_FIRST = ["full_attention", *["sliding_attention"] * 3, "full_attention", "full_attention"]
MIXED = {**LLAMA, "num_hidden_layers": 6, "sliding_window": 7, "layer_types": FULL_FIRST}
BIASED = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 1}
