#!/bin/sh
# The smoke test and the contract's tests on rxe0, in a VM for each of the newest kernels of Debian. `make test-kernels` writes the
# results to a table of the README. `make test` takes the newest kernel of all.
#
#   KERNELS="stable unstable"    chooses suites. Without it: all of rig/kernels.sh
#
# Ends with status 3 if the kernels are not there and cannot be fetched.

set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
results=.rig/results/kernels
rm -rf $results
mkdir -p $results
unset PYTHONDONTWRITEBYTECODE
$python -m compileall -q ndpy tests

rig/kernels.sh ${KERNELS:-stable testing unstable} >$results/kernels || exit 3
status=0
while read -r suite kernel folder <&3; do
    echo "== Linux $kernel of Debian $suite"
    # One VM for both, because a boot takes 15 s in emulation.
    $python -m ndpy softroce run --vm --adapter rxe --kernel-root $folder --limit 3000 -- sh -c '
        python=$1 results=$2
        shift 2
        $python -m ndpy smoke rxe0 --junit "$results-smoke.xml"
        status=$?
        $python -m pytest tests/contract --adapter rxe0 -p no:cacheprovider --junitxml "$results-contract.xml" "$@" || status=1
        exit $status
        ' sh $python "$results/$kernel" ${ARGS:-} || status=1
done 3<$results/kernels
exit $status
