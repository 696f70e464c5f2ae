#!/bin/sh
# Fine-tunes a Hugging Face checkpoint with low-rank adapters on your own text, and writes a Hugging Face folder again.
#
#     sh examples/lora_from_hugging_face.sh Qwen2.5-0.5B 'notes/*.md' --steps 200
#
# The first argument is a folder with config.json, safetensors files and tokenizer.json, which `hf download` makes; the
# second is the text. What follows are flags of `spmd train`. It leaves runs/base, runs/tuned and the folder tuned-hf.
set -eu
model=$1 text=$2
shift 2
spmd import "$model" --out runs/base
spmd train runs/base/config.py --init runs/base --out runs/tuned --data.source "$text" \
  --lora.targets 'attention/(q|k|v|o)_proj/kernel' --lora.rank 16 \
  --optimizer.learning-rate 1e-4 --optimizer.schedule constant --steps 200 --data.batch 8 "$@"
spmd export runs/tuned --out tuned-hf
spmd generate runs/tuned --prompt "The " --tokens 16
