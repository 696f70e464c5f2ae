"""Mistral: Llama's table."""

from spmd.partition_rules.llama import LLAMA

MISTRAL = LLAMA
