#!/bin/sh
# Runs the tests with the free-threaded Python of freethreaded.sh.
#   rig/test-freethreaded.sh          tests/unit on this machine, and tests/contract and tests/examples on soft0
#   rig/test-freethreaded.sh rxe      tests/contract on rxe0, in a VM
#   rig/test-freethreaded.sh tsan     the tests of the core and of threads, with ThreadSanitizer in Python, the modules and softverbs
# NDPY_STRESS=1 asks for full counts. ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
checkout=$PWD
results=$PWD/.rig/results
mkdir -p "$results"
failed=
if [ -n "${NDPY_STRESS:-}" ]; then limit=10800; else limit=2400; fi

. rig/sanitized.sh

report() { if [ "$2" != 0 ]; then failed="$failed $1"; fi; }

run() {
    name=$1
    shift
    timeout $limit "$python" -m pytest -p no:cacheprovider --junitxml "$results/freethreaded-$name.xml" "$@" ${ARGS:-}
    report "$name" $?
}

part=${1:-own}
case $part in
own | rxe) rig/freethreaded.sh && python=$PWD/.rig/freethreaded/venv/bin/python ;;
tsan) rig/freethreaded.sh tsan && python=$PWD/.rig/freethreaded-tsan/venv/bin/python ;;
*) echo "unknown part $part" >&2; exit 2 ;;
esac || exit 1

case $part in
own)
    # The tests of the commands that boot a VM say nothing about Python. Without the GIL it cannot use malloc(), which
    # AddressSanitizer needs to see the memory of objects.
    run unit tests/unit --ignore tests/unit/test_softroce_vm.py --ignore tests/unit/test_core_sanitized.py
    run contract tests/contract tests/examples --adapter soft0
    ;;
rxe)
    "$python" -m compileall -q ndpy tests
    .venv/bin/ndpy softroce run ${SOFTROCE---vm} --adapter rxe --limit $limit -- \
        "$python" -m pytest tests/contract --adapter rxe0 -p no:cacheprovider ${ARGS:-}
    report rxe $?
    ;;
tsan)
    build_sanitized freethreaded-tsan && sanitized freethreaded-tsan timeout $limit "$python" -m pytest \
        -c "$checkout/pyproject.toml" "$checkout/tests/unit/test_core.py" "$checkout/tests/unit/test_core_regions.py" \
        "$checkout/tests/unit/test_lease.py" \
        "$checkout/tests/contract/test_several_threads.py" "$checkout/tests/contract/test_registration_cache_threads.py" \
        --adapter soft0 -p no:cacheprovider ${ARGS:-}
    report tsan $?
    ;;
esac
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
