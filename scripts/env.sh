#!/usr/bin/env bash
# Makes (or reuses) the Python environment of this repository and prints the path of its python on the last line.
#
#   scripts/env.sh cpu|cuda|rocm
#
# An active virtual environment, or an image's python, that already satisfies requirements/<platform>.txt is used as it
# is. Otherwise .venv is made from that lock; a second start costs about a second. Variables: PYTHON (interpreter for a
# new environment), RLK_VENV (its folder, default .venv), RLK_BUILD (what setup.py compiles, default by platform).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
platform=${1:-cpu}
lock=$root/requirements/$platform.txt
venv=${RLK_VENV:-$root/.venv}
say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

[ -f "$lock" ] || die "platform '$platform' is unknown; choose cpu, cuda or rocm"
[ "$(uname -sm)" = "Linux x86_64" ] || die "this needs Linux on x86-64, this machine is $(uname -sm)"

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' >/dev/null 2>&1; }
satisfied() { "$1" "$root/scripts/check_lock.py" "$lock" "${2:-}" >/dev/null 2>&1; }

here() { # is this checkout, compiled, what the interpreter imports?
  (cd / && "$1" -c 'import sys, rl_kernel._C as c; sys.exit(not c.__file__.startswith(sys.argv[1] + "/"))' "$root") 2>/dev/null
}
need_compiler() {
  command -v "${CXX:-g++}" >/dev/null || die "no C++ compiler: install g++ (Debian: apt-get install g++) or set CXX"
}
build() { # compile csrc when its sources, setup.py or the interpreter changed
  local python=$1 stamp want
  stamp=$root/build/.stamp-$platform
  want=$(cd "$root" && { "$python" -c 'import sys, torch; print(sys.executable, torch.__version__)'; printf '%s\n' "${RLK_BUILD:-$platform}"
         find csrc setup.py pyproject.toml -type f -print0 | sort -z | xargs -0 sha256sum; } | sha256sum | cut -c1-32)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && here "$python"; then return; fi
  need_compiler
  say "compiling the operators (about a minute)"
  mkdir -p "$root/build"
  (cd "$root" && RLK_BUILD=${RLK_BUILD:-$platform} "$python" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e . >"$root/build/install.log" 2>&1) ||
    { tail -n 40 "$root/build/install.log" >&2; die "the build failed; the whole log is in build/install.log"; }
  printf '%s' "$want" >"$stamp"
}

mkdir -p "$root/build"
exec 9>"$root/build/.env.lock"
flock 9 # two starts at once must not install into one folder

python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}
if [ -z "$python" ] || ! satisfied "$python"; then
  python=$venv/bin/python
  if [ "$platform" != cpu ] && satisfied "$(command -v python3)"; then
    python=$(command -v python3) # the vendor image
  elif [ ! -x "$python" ] || ! satisfied "$python"; then
    [ "$platform" = cpu ] || die "python3 does not satisfy requirements/$platform.txt: run inside the image of Dockerfile.$platform ($(python3 "$root/scripts/check_lock.py" "$lock" 2>&1 | head -n 3 | tr '\n' ';'))"
    base=
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
      if [ -n "$candidate" ] && usable "$candidate"; then base=$candidate; break; fi
    done
    [ -n "$base" ] || die "no Python 3.11 or 3.12 with venv found; install one (Debian: apt-get install python3-venv python3-dev) or set PYTHON"
    need_compiler # before minutes of downloads
    say "making $venv from requirements/$platform.txt with $("$base" --version)"
    [ -x "$python" ] || "$base" -m venv "$venv"
    pip() { "$python" -m pip --disable-pip-version-check "$@"; }
    # torch alone comes from another index: the CPU build exists under PyTorch's own index, or wherever pip is pointed.
    torch=$(grep -E '^torch==' "$lock")
    if ! pip install -q --no-deps "$torch" 2>"$root/build/torch.log"; then
      pip install -q --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" || { cat "$root/build/torch.log" >&2; die "cannot install $torch"; }
    fi
    # The lock is complete, so no resolver runs. --ignore-requires-python: megatron-core 0.19 declares 3.12 and runs on 3.11.
    grep -vE '^(torch==|#|$)' "$lock" >"$root/build/lock.txt"
    pip install -q --no-deps --ignore-requires-python -r "$root/build/lock.txt"
    satisfied "$python" || { "$python" "$root/scripts/check_lock.py" "$lock" >&2 || true; die "the environment does not match its lock; remove $venv and try again"; }
  fi
fi
build "$python"
printf '%s\n' "$python"
