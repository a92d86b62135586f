#!/usr/bin/env bash
# Everything that can be checked without a GPU: lint, types, operators, Triton under its interpreter, cross-compilation
# with the instruction audit, both engines, and a short strict run (0 mismatches) beside a stock one (not 0).
#
#   bash scripts/test.sh [pytest arguments]     with arguments: only pytest with them, in the same environment
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/env.sh" cpu | tail -n 1)
cd "$root"
export PYTHONUNBUFFERED=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }
step "lint and types"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy rl_kernel recipes
step "environment (tests skip what is not installed: here nothing may be missing)"
"$python" -m recipes.doctor --quick
step "tests"
"$python" -m pytest -q -m "not gpu" --durations=15
step "done"
