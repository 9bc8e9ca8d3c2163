#!/bin/sh
# Runs ndpy's tests for Windows on a Windows Python under Wine, with softnd: the contract tests, the examples, and the tests
# of NetworkDirect. Then it runs the contract tests with version 1 of NetworkDirect; normally only the files in which version 1
# differs most. NDPY_STRESS=1 asks for full counts and all the files. ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
results=.rig/results
mkdir -p $results
version_1='tests/contract/test_memory_window.py tests/contract/test_send_and_invalidate.py
    tests/contract/test_connector.py'
if [ -n "${NDPY_STRESS:-}" ]; then limit=10800 version_1=tests/contract; else limit=1800; fi
folders='tests/contract tests/examples'
if [ -d tests/networkdirect ]; then folders="$folders tests/networkdirect"; fi

on_softnd() {
    junit=$1
    shift
    NDPY_PROVIDER='softrdma\build\softnd.dll' WINE_LIMIT=$limit rig/wine-python -m pytest "$@" --adapter softnd0 \
        -p no:cacheprovider --junitxml "$results/$junit.xml" ${ARGS:-}
}

rig/windows/extension.sh && make -s -C softrdma build/softnd.dll && make -s -C tests/networkdirect/providers || exit 1
echo "== tests on softnd0, under Wine"
on_softnd softnd0 $folders
status=$?
echo "== tests on softnd0 as version 1, under Wine"
NDPY_PROVIDER_VERSION=1 on_softnd softnd0-version-1 $version_1 && exit $status
exit 1
