#!/bin/sh
# The smoke test and the contract's tests on rxe0, in VMs with the newest kernels of Debian. `make test-kernels` writes the results to
# a table of the README. `make test` takes the newest kernel of all.
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
    run="$python -m ndpy softroce run --vm --adapter rxe --kernel-root $folder"
    $run --limit 900 -- $python -m ndpy smoke rxe0 --junit "$results/$kernel-smoke.xml" || status=1
    $run --limit 2400 -- $python -m pytest tests/contract --adapter rxe0 -p no:cacheprovider \
        --junitxml "$results/$kernel-contract.xml" ${ARGS:-} || status=1
done 3<$results/kernels
exit $status
