#!/usr/bin/env bash
# Builds an sdist and, from it, wheels (dist/), installs each wheel in a clean environment and runs scripts/smoke.py there, and
# on each Python the tests of the configuration, which needs neither torch nor vLLM.
#
#   scripts/wheel.sh              wheels with the C++ extension, by .venv (make wheel sets that up), and without
#   scripts/wheel.sh --pure       the wheel without extension, which needs no .venv and no torch
#
# PYTHONS names interpreters for the wheel without extension; by default python3.10 to python3.13 in PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
OUT=out/wheel
LOG=$OUT/log
CPU_WHEELS=https://download.pytorch.org/whl/cpu

say() { printf 'wheel  %s\n' "$*"; }
quietly() { "$@" >>"$LOG" 2>&1 || { tail -n 20 "$LOG" >&2; say "failed: $* (all of it: $LOG)" >&2; exit 1; }; }
runs() { "$1" -c 'import venv, ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; }

rm -rf "$OUT" dist build
mkdir -p "$OUT" dist
: >"$LOG"

pythons=()
for python in ${PYTHONS:-python3.10 python3.11 python3.12 python3.13}; do
    if runs "$python"; then pythons+=("$python"); else say "no $python here"; fi
done
[ ${#pythons[@]} -gt 0 ] || { say "found no Python 3.10 to 3.13; name one: PYTHONS=/path/to/python" >&2; exit 1; }

# Makes an empty environment, and prints its Python.
clean() { rm -rf "$OUT/$1"; quietly "$2" -m venv "$OUT/$1"; echo "$OUT/$1/bin/python"; }
pip() { local python=$1; shift; quietly "$python" -m pip install --disable-pip-version-check "$@"; }
# Runs outside of the checkout, so that only installed packages can be imported.
smoke() {
    local python=$PWD/$1 script=$PWD/scripts/smoke.py; shift
    (cd "${TMPDIR:-/tmp}" && env -u PYTHONPATH "$python" "$script" "$@")
}
# The tests find the installed package: of the checkout, only their own folder is on the path.
configuration() {
    pip "$1" pytest hypothesis
    quietly env -u PYTHONPATH "${1%/*}/pytest" -q --noconftest -p no:cacheprovider tests/unit/test_config*.py
    say "$(tail -n 1 "$LOG"): tests of the configuration"
}
# Requirements of the wheel without torch, which the pure part does not need.
requirements() {
    "$1" -c 'from importlib.metadata import requires as r; print(*(d for d in r("vllm-evict") if ";" not in d and d != "torch"))'
}

builder=$(clean builder "${pythons[0]}")
pip "$builder" build
say "sdist"
quietly "$builder" -m build --sdist --outdir dist .
sdist=$(echo dist/*.tar.gz)
say "wheel without extension, from $sdist"
VLLM_EVICT_NO_EXT=1 quietly "$builder" -m pip wheel --no-deps --wheel-dir dist "$sdist"
pure=$(echo dist/*-none-any.whl)

for python in "${pythons[@]}"; do
    say "$pure in a clean $("$python" -V)"
    clean=$(clean pure "$python")
    pip "$clean" --no-deps "$pure"
    # shellcheck disable=SC2046
    pip "$clean" $(requirements "$clean")
    smoke "$clean"
    configuration "$clean"
done

[ "${1:-}" != --pure ] || exit 0

say "wheel with the C++ extension, from $sdist"
quietly "$VENV/bin/python" -m pip wheel --no-deps --no-build-isolation --wheel-dir dist "$sdist"
compiled=$(echo dist/*-linux_*.whl)
say "$compiled in a clean $("$VENV/bin/python" -V), with torch"
clean=$(clean compiled "$VENV/bin/python")
torch="torch==$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
"$clean" -m pip install --disable-pip-version-check "$torch" >>"$LOG" 2>&1 || pip "$clean" "$torch" --extra-index-url "$CPU_WHEELS"
pip "$clean" "$compiled"
smoke "$clean" --extension
