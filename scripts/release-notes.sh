#!/usr/bin/env bash
# Prints CHANGELOG.md's section of a version. Fails if there is no such section, or if it is empty.
#
#   scripts/release-notes.sh 0.1.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
notes=$(awk -v version="$1" '/^## /{inside = $2 == version; next} inside' CHANGELOG.md)
[ -n "${notes//[[:space:]]/}" ] || { echo "CHANGELOG.md got no section '## $1'; expected one with what changed" >&2; exit 1; }
printf '%s\n' "$notes" | sed '1{/^$/d}'
