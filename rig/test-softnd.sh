#!/bin/sh
# Builds softnd.dll and runs its tests:
#   rig/test-softnd.sh windows   the wire code, natively with sanitizers and in a fuzzer; then the tests
#                                that need Windows, on a Windows Python under Wine
#   rig/test-softnd.sh peers     hostile and other peers, in Python, against a provider under Wine
#   rig/test-softnd.sh siw       siw in a VM against a provider under Wine
#   rig/test-softnd.sh           all of these
# NDPY_STRESS=1 asks for full counts. ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
results=.rig/results
siw=tests/softnd/test_siw.py
mkdir -p $results
failed=
if [ -n "${NDPY_STRESS:-}" ]; then limit=10800 fuzz_s=60; else limit=1200 fuzz_s=20; fi

report() { if [ "$2" != 0 ]; then failed="$failed $1"; fi; }

windows() {
    echo "== softnd: its wire code, natively"
    make -s -C softrdma/fuzz test
    report wire $?
    nice -n 19 make -s -C softrdma/fuzz fuzz SECONDS=$fuzz_s >$results/fuzz.log 2>&1 &
    fuzzer=$!

    echo "== softnd under Wine"
    WINE_LIMIT=$limit rig/wine-python -m pytest tests/softnd -c pyproject.toml --confcutdir=tests/softnd \
        -p no:cacheprovider --junitxml $results/softnd-windows.xml ${ARGS:-}
    report softnd-windows $?
    wait $fuzzer
    status=$?
    tail -n 6 $results/fuzz.log
    report fuzz $status
}

peers() {
    echo "== softnd and other ends"
    $python -m pytest tests/softnd --ignore $siw --junitxml $results/softnd.xml ${ARGS:-}
    report softnd-peers $?
}

siw() {
    echo "== softnd and siw"
    $python -m pytest $siw --junitxml $results/softnd-siw.xml ${ARGS:-}
    report softnd-siw $?
}

make -s -C softrdma build/softnd.dll || exit 1
case ${1:-all} in
windows) windows ;;
peers) peers ;;
siw) siw ;;
all) windows; peers; siw ;;
*) echo "unknown part $1" >&2; exit 2 ;;
esac
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
