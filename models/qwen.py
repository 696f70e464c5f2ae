"""Qwen: a Llama with biases in attention (Qwen 2) or normalised queries and keys (Qwen 3).

Sources: arXiv:2407.10671 for Qwen 2, arXiv:2505.09388 for Qwen 3.

```python
config = dataclasses.replace(PRESETS["qwen3-8b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses

from spmd.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class QwenConfig(LlamaConfig):
    """Shape of a Qwen; of a Qwen 2 by default."""

    rope_theta: float = 1e6
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    qkv_bias: bool = True
    """Add biases to queries, keys and values (Qwen 2)."""


_QWEN3 = QwenConfig(head_dim=128, qkv_bias=False, qk_norm=True)

PRESETS = {
    "test-qwen2": QwenConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    "test-qwen3": dataclasses.replace(
        _QWEN3,
        vocab=64,
        d_model=32,
        layers=2,
        heads=4,
        kv_heads=2,
        d_ff=64,
        head_dim=4,
        tied=True,
    ),
    "qwen2.5-0.5b": QwenConfig(151_936, 896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": QwenConfig(151_936, 1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-7b": QwenConfig(152_064, 3584, 28, 28, 4, 18_944),
    "qwen2.5-72b": QwenConfig(152_064, 8192, 80, 64, 8, 29_568, norm_eps=1e-5),
    "qwen3-0.6b": dataclasses.replace(
        _QWEN3,
        vocab=151_936,
        d_model=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        d_ff=3072,
        tied=True,
    ),
    "qwen3-8b": dataclasses.replace(
        _QWEN3, vocab=151_936, d_model=4096, layers=36, heads=32, kv_heads=8, d_ff=12_288
    ),
    "qwen3-32b": dataclasses.replace(
        _QWEN3, vocab=151_936, d_model=5120, layers=64, heads=64, kv_heads=8, d_ff=25_600
    ),
}
"""Published shapes by name, and small ones for tests."""
