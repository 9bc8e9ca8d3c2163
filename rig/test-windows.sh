#!/bin/sh
# Runs what ndpy does on Windows, on a Windows Python under Wine over softnd: the contract suite, what only NetworkDirect
# has, and the examples. NDPY_STRESS=1 asks for full counts, ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
results=.rig/results
mkdir -p $results
if [ -n "${NDPY_STRESS:-}" ]; then limit=5400; else limit=600; fi
folders='tests/contract tests/examples'
if [ -d tests/networkdirect ]; then folders="$folders tests/networkdirect"; fi

rig/windows/extension.sh && make -s -C softnd && make -s -C tests/networkdirect/providers || exit 1
echo "== tests on softnd0, under Wine"
NDPY_PROVIDER='softnd\build\softnd.dll' WINE_LIMIT=$limit rig/wine-python -m pytest $folders --adapter softnd0 \
    -p no:cacheprovider --junitxml $results/softnd0.xml ${ARGS:-}
