"""Chat templates, conversations and a tokenizer for tests."""

import json
from pathlib import Path

import tokenizers

from spmd.data.chat import ChatTemplate

CHATML = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{%- for m in messages -%}\n    {{- '<|im_start|>' + m['role'] + '\\n' -}}\n"
    "    {%- if m['role'] == 'assistant' -%}\n"
    "        {%- generation -%}{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}\n"
    "    {%- else -%}{{- m['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}\n{%- endfor -%}"
)
TOOLS = (
    "{% if tools %}Tools: {{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{% if loop.last %}"
    "{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endfor %} on {{ strftime_now('%Y') }}"
)
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As templates of models that reason: no thoughts of turns before the last question."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "  It is 4, é 😀.\n\n"},
    {"role": "user", "content": "And <b>'3 + 3'</b>?\n"},
    {"role": "assistant", "content": "6"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *PLAIN]


def template(source: str, **fields) -> ChatTemplate:
    return ChatTemplate(source, "a template", TOKENS, **fields)


def words() -> tokenizers.Tokenizer:
    """A byte-level tokenizer with a few merges, which leaves spaces out of the characters of a token."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    model.decoder = tokenizers.decoders.ByteLevel()
    special = [
        "</s>",
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([m["content"] for m in SYSTEM] * 3, trainer)
    return model


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with the settings that `transformers` reads; return the folder."""
    words().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
