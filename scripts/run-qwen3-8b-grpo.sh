#!/usr/bin/env bash
# Qwen3-8B GRPO (or PPO) with bit-identical log-probabilities in rollout and training.
#
#   bash scripts/run-qwen3-8b-grpo.sh cpu  [hydra overrides]    embedded: tiny Qwen3, real vLLM and Megatron-Core, no GPU
#   bash scripts/run-qwen3-8b-grpo.sh cuda [hydra overrides]    8x H100, inside the image of Dockerfile.cuda
#   bash scripts/run-qwen3-8b-grpo.sh rocm [hydra overrides]    8x MI300X, inside the image of Dockerfile.rocm
#
# One or two H200s, without vime: cuda experiment=qwen3_8b_grpo_h200_1gpu (or _2gpu).
# Overrides are Hydra's: algorithm=ppo consistency=native trainer.steps=200 rollout.temperature=0.7 ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
platform=${1:-}
case "$platform" in
  cpu) defaults=(hardware=cpu) ;;
  cuda) defaults=(model=qwen3_8b hardware=h100 orchestrator=vime) ;;
  rocm) defaults=(model=qwen3_8b hardware=mi300x orchestrator=vime) ;;
  *) sed -n '2,9p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
esac
shift
for override in "$@"; do # an override wins over the platform's default of the same group
  key=${override%%=*}
  [ "$key" = experiment ] && defaults=() # it chooses all groups itself
  kept=(); for default in "${defaults[@]}"; do [ "${default%%=*}" = "$key" ] || kept+=("$default"); done
  defaults=("${kept[@]+"${kept[@]}"}")
done
python=$(bash "$root/scripts/env.sh" "$platform" | tail -n 1)
cd "$root"
exec "$python" -m recipes.main "${defaults[@]+"${defaults[@]}"}" "$@"
