"""Mistral: Llama's table."""

from partition_rules.llama import LLAMA

MISTRAL = LLAMA
