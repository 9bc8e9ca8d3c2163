#!/bin/sh
# Builds softnd.dll and runs its tests: clauses of the contract on a Windows Python under Wine, the wire code natively,
# and other iWARP ends against a provider under Wine. NDPY_STRESS=1 asks for full counts, ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
results=.rig/results
mkdir -p $results
failed=
if [ -n "${NDPY_STRESS:-}" ]; then limit=5400; else limit=420; fi

report() { if [ "$2" != 0 ]; then failed="$failed $1"; fi; }

make -s -C softnd || exit 1

echo "== softnd: its wire code, natively under sanitizers, and a minute in a fuzzer"
make -s -C softnd/fuzz test
report wire $?
make -s -C softnd/fuzz fuzz SECONDS=60 >$results/fuzz.log 2>&1 &
fuzzer=$!

echo "== softnd under Wine"
WINE_LIMIT=$limit rig/wine-python -m pytest tests/softnd -c pyproject.toml --confcutdir=tests/softnd \
    -p no:cacheprovider --junitxml $results/softnd-windows.xml ${ARGS:-}
report softnd-windows $?

echo "== softnd and other ends"
$python -m pytest tests/softnd --junitxml $results/softnd.xml ${ARGS:-}
report softnd $?

wait $fuzzer
status=$?
tail -n 12 $results/fuzz.log
report fuzz $status

if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
