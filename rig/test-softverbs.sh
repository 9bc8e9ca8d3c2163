#!/bin/sh
# Runs softverbs where mistakes show: under sanitizers, with hostile peers, in fuzzers.
#   rig/test-softverbs.sh asan   the contract, the smoke test and the examples on soft0, with AddressSanitizer and
#                                UndefinedBehaviorSanitizer in the library and the package's modules
#   rig/test-softverbs.sh tsan   the same with ThreadSanitizer
#   rig/test-softverbs.sh own    tests/soft: hostile peers, threads, switches
#   rig/test-softverbs.sh        what `make test` runs: all but tsan, and with NDPY_STRESS=1 that too
# NDPY_STRESS=1 asks for full counts in tests/soft. ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
checkout=$PWD
python=$PWD/.venv/bin/python
results=$PWD/.rig/results
mkdir -p "$results"
failed=
if [ -n "${NDPY_STRESS:-}" ]; then limit=10800; else limit=1200; fi

. rig/sanitized.sh

report() { if [ "$2" != 0 ]; then failed="$failed $1"; fi; }

on_soft0() {
    kind=$1
    shift
    echo "== the contract, the smoke test and the examples on soft0, $kind"
    build_sanitized "$kind" && NDPY_STRESS= sanitized "$kind" timeout $limit "$python" -m pytest -c "$checkout/pyproject.toml" \
        "$checkout/tests/contract" "$checkout/tests/examples" --adapter soft0 -p no:cacheprovider \
        --junitxml "$results/softverbs-$kind.xml" "$@" ${ARGS:-}
    report "softverbs-$kind" $?
    sanitized "$kind" timeout $limit "$python" -m ndpy smoke soft0 >"$results/smoke-$kind.log" 2>&1
    report "smoke-$kind" $?
    tail -n 1 "$results/smoke-$kind.log"
}

# The runtime of ThreadSanitizer takes the pages that this test unmaps and wants back.
tsan() {
    on_soft0 tsan --deselect \
        tests/contract/test_registration_cache_monitor.py::test_k_1_8_monitored_memory_in_use_is_detached_and_deregistered_on_release
}

own() {
    echo "== tests of softverbs alone"
    timeout $limit "$python" -m pytest tests/soft --junitxml "$results/softverbs.xml" ${ARGS:-}
    report softverbs $?
}

case ${1:-all} in
asan) on_soft0 asan ;;
tsan) tsan ;;
own) own ;;
all)
    on_soft0 asan
    if [ -n "${NDPY_STRESS:-}" ]; then tsan; fi
    own
    ;;
*) echo "unknown part $1" >&2; exit 2 ;;
esac
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
