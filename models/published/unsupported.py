"""Architectures of transformers without a family, each with the missing option.

`spmd import` names the option in its refusal. A family for such an architecture replaces its entry.
"""

_INDEXER = "sparse attention by an indexer (`index_topk`)"
_HYPER_CONNECTIONS = "hyper-connections, several residual streams"
_ALIBI = "ALiBi, linear biases of attention in place of rotary positions"
_SELECTIVE_SCAN = "Mamba 1's selective scan, with a decay for each channel and state"
_LIGHTNING = "lightning attention, linear attention with a fixed decay for each head"
_SHARED_KV = "keys and values shared between layers (`num_kv_shared_layers`)"
_PER_LAYER_EMBEDDINGS = "embeddings for each layer (`hidden_size_per_layer_input`)"

MISSING_OPTIONS = {
    "AXK2ForCausalLM": _INDEXER,
    "BailingHybridForCausalLM": _LIGHTNING,
    "BitNetForCausalLM": "ternary weights, and norms inside of attention and MLP",
    "BloomForCausalLM": _ALIBI,
    "DeepseekV32ForCausalLM": _INDEXER,
    "DeepseekV4ForCausalLM": f"compressed attention, hash routing, and {_HYPER_CONNECTIONS}",
    "DiffLlamaForCausalLM": "differential attention",
    "DogeForCausalLM": "attention with a learned dynamic mask",
    "FalconMambaForCausalLM": _SELECTIVE_SCAN,
    "Gemma3nForCausalLM": f"{_PER_LAYER_EMBEDDINGS}, AltUp, and {_SHARED_KV}",
    "Gemma3nForConditionalGeneration": f"{_PER_LAYER_EMBEDDINGS}, AltUp, and {_SHARED_KV}",
    "Gemma4ForCausalLM": f"{_PER_LAYER_EMBEDDINGS}, and {_SHARED_KV}",
    "Gemma4ForConditionalGeneration": f"{_PER_LAYER_EMBEDDINGS}, and {_SHARED_KV}",
    "GlmMoeDsaForCausalLM": _INDEXER,
    "HYV4ForCausalLM": f"{_INDEXER}, and {_HYPER_CONNECTIONS}",
    "JambaForCausalLM": _SELECTIVE_SCAN,
    "KimiLinearForCausalLM": "Kimi delta attention, with a decay for each channel",
    "LongcatFlashForCausalLM": "two attentions and MLPs in a layer, and experts without weights",
    "MambaForCausalLM": _SELECTIVE_SCAN,
    "MiniMaxForCausalLM": _LIGHTNING,
    "ModernBertDecoderForCausalLM": "norms of embeddings, and a dense layer before the head",
    "MptForCausalLM": _ALIBI,
    "PhimoeForCausalLM": "the router of SparseMixer",
    "Qwen4ExpForCausalLM": f"{_INDEXER}, and {_HYPER_CONNECTIONS}",
    "Qwen4ExpForConditionalGeneration": f"{_INDEXER}, and {_HYPER_CONNECTIONS}",
    "RecurrentGemmaForCausalLM": "real-gated linear recurrent units",
    "RwkvForCausalLM": "RWKV's time mixing",
    "Zamba2ForCausalLM": "blocks of attention and MLP that layers share, each with adapters",
    "ZambaForCausalLM": _SELECTIVE_SCAN,
    "ZayaForCausalLM": "compressed convolutional attention",
    "xLSTMForCausalLM": "matrix-memory LSTM cells",
}
"""Architecture → the option that it needs, in words."""
