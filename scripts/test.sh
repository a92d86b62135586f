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
step "lint"
"$python" -m ruff check .
"$python" -m ruff format --check .
"${python%/*}/clang-format" --dry-run --Werror csrc/*.cpp csrc/*/*
step "environment (tests skip what is not installed: here nothing may be missing)"
"$python" -m recipes.doctor --quick

# Two lanes: starts and waits of one leave cores to the other. Whatever the engines' lane does not name is in the other.
cores=$(nproc)
export OMP_NUM_THREADS=$((cores > 3 ? cores / 2 : 1)) # torch's default is every core, in each lane
tests=("$python" -m pytest -q -m "not gpu" --durations=15)
processes=tests/recipes/test_loop_processes.py
log=$root/build/test-operators.log
operators() {
  local failed=0
  "$python" -m mypy rl_kernel recipes || failed=1
  "${tests[@]}" --ignore=tests/engines --ignore=tests/recipes tests || failed=1
  "${tests[@]}" "$processes" || failed=1
  return "$failed"
}
step "types, operators, processes in the background: build/test-operators.log"
set -m # a process group of its own: without, bash has it ignore Ctrl-C, which tests send to the runs they start
operators >"$log" 2>&1 &
lane=$!
set +m
trap 'kill -- "-$lane" 2>/dev/null || true' EXIT
trap 'exit 130' INT # pytest ends by itself after Ctrl-C: without, this script would go on and wait for the other lane
step "engines and loop"
failed=
"${tests[@]}" tests/engines tests/recipes --ignore="$processes" || failed+="; engines and loop (above the log of the others)"
step "types, operators, processes: waiting for the end"
wait "$lane" || failed+="; types, operators or processes (build/test-operators.log)"
cat "$log"
if [ -n "$failed" ]; then step "FAILED: ${failed#; }"; exit 1; fi
step "all passed"
