#!/usr/bin/env bash
# Sees to a Chromium for the tests that open pages (tests/harness/browser.py): one that is installed, else Debian's or
# Ubuntu's package, where this user may install packages. Without any, those tests are skipped, and say why.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then exit; fi
done
install=(apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core)
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "set-up  Chromium, for tests of pages"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    if { apt-get update --quiet && "${install[@]}"; } >"$log" 2>&1; then
        rm "$log"
    else
        tail -n 5 "$log" >&2
        echo "set-up  Chromium cannot be installed here: tests of pages are skipped" >&2
    fi
else
    echo "set-up  no Chromium here: tests of pages are skipped (Debian: ${install[*]})" >&2
fi
