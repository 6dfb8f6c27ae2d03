#!/usr/bin/env bash
# LowRankArena's three models with 80% and 60% of their linear weights kept, as entries for its registry.
# A GPU with 80 GB and the three models on the hub are needed; written from their documents, not run on these models.
# Qwen3 has one norm for all heads, so a stock checkpoint holds its queries and keys whole: MLPs give up all of it
# (78% of its linear weights are there: 0.2 / 0.78 and 0.4 / 0.78).
set -euo pipefail

entry() { # MODEL KEPT RATIO [OPTIONS]
  local model=$1 kept=$2 ratio=$3 name
  name="$(basename "$model")-$kept"
  trisect compress "$model" -o "native-$name" --ratio "$ratio" --portable --device cuda \
    --calibration wikitext2 --samples 256 --length 2048 "${@:4}"
  trisect export "native-$name" -o "arena-$name" --to arena
}

for model in jeffwan/llama-7b-hf meta-llama/Llama-3.1-8B; do
  entry "$model" 80 0.2
  entry "$model" 60 0.4
done
entry Qwen/Qwen3-8B-Base 80 0.255 --parts mlp
entry Qwen/Qwen3-8B-Base 60 0.511 --parts mlp
