#!/usr/bin/env bash
# Provides the browser in which tests open the pages that `mtrain` writes: $MTRAIN_BROWSER, or one on PATH, or Debian's
# chromium, which this script installs as root. If no browser can be had, for instance without root, it says so, and the
# suite lists the tests that did not run; with MTRAIN_REQUIRE_ALL_TESTS=1, as in CI, it exits with 7.
set -euo pipefail

if [[ -n ${MTRAIN_BROWSER:-} ]]; then
  command -v "$MTRAIN_BROWSER" >/dev/null && exit
  echo "error: MTRAIN_BROWSER=$MTRAIN_BROWSER is no program; name a chromium or unset it" >&2
  exit 7
fi
for name in chromium chromium-browser google-chrome google-chrome-stable; do
  command -v "$name" >/dev/null && exit
done
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "installing chromium (a minute, once)"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  if apt-get update -qq >"$log" 2>&1 && apt-get install -y -qq --no-install-recommends chromium >>"$log" 2>&1 &&
    command -v chromium >/dev/null; then
    rm "$log"
    exit
  fi
  tail -n 5 "$log" >&2
fi
none="no chromium is on PATH and none could be installed here; install one, or name a browser of its kind in MTRAIN_BROWSER"
if [[ ${MTRAIN_REQUIRE_ALL_TESTS:-} == 1 ]]; then
  echo "error: $none" >&2
  exit 7
fi
echo "note: $none; the tests that open pages do not run" >&2
