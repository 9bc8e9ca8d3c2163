#!/bin/sh
# Runs all the tests, for `make test`, which sets the machine up first:
#
#   on this machine   tests/unit, tests/wheels
#   in a VM           the tests that need an adapter, on rxe0 and then on siw0
#   under Wine        rig/test-softnd.sh and rig/test-windows.sh, then the VM's own tests and softnd against siw: in the background
#
# NDPY_STRESS=1 asks for full counts. ARGS goes to pytest. At the end, each part's time and slowest modules are printed.

set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
results=.rig/results
mkdir -p $results
rm -rf $results/*.xml $results/*.log .rig/wheels
# The limit is for a VM that hangs. A test that hangs has its own limit, and a busy machine may be slow.
if [ -n "${NDPY_STRESS:-}" ]; then limit=10800; else limit=3600; fi
failed=
started=$(date +%s)

# Compiled here, because the VM is slow at it. A test module that cannot be imported shows at once.
unset PYTHONDONTWRITEBYTECODE
$python -m compileall -q ndpy tests examples
$python tests/programs.py || exit 1
$python -m pytest tests --collect-only -q >$results/collected.txt 2>&1 ||
    { cat $results/collected.txt; exit 1; }

begin() { echo "== $* (after $((($(date +%s) - started) / 60)) min)"; }
report() { if [ "$2" != 0 ]; then failed="$failed $1"; fi; }

on_adapter() {
    kind=$1 adapter=$2
    shift 2
    begin "tests on $adapter"
    .venv/bin/ndpy softroce run ${SOFTROCE---vm} --adapter "$kind" --limit $limit -- \
        $python -m pytest "$@" --adapter "$adapter" \
        -p no:cacheprovider --junitxml "$results/$adapter.xml" ${ARGS:-}
    report "$adapter" $?
}

# `softroce run --adapter siw` boots the newest kernel that has siw. That need not be the newest kernel.
has_siw() { $python -c 'from ndpy.softroce import tools; tools.find_kernel(adapters=("siw",))' 2>/dev/null; }

# Built here, so that the parts that need softnd.dll do not build it at the same time.
make -s -C softnd || exit 1

# Programs under Wine wait more than they compute. So these tests run beside the others. The parts that start short VMs come
# after them: two emulated VMs at the same time are slow on two processors.
vm_tests=tests/unit/test_softroce_vm.py
{
    status=0
    rig/test-softnd.sh windows || status=1
    rig/test-windows.sh || status=1
    rig/test-softnd.sh peers || status=1
    echo "== tests of the VM"
    $python -m pytest $vm_tests --junitxml $results/vm.xml ${ARGS:-} || status=1
    rig/test-softnd.sh siw || status=1
    echo "== end (after $((($(date +%s) - started) / 60)) min)"
    exit $status
} >$results/background.log 2>&1 &
background=$!
# A background job of a shell ignores Ctrl-C.
trap 'kill $background; exit 130' INT TERM

begin "tests without an adapter"
$python -m pytest tests/unit tests/wheels --ignore $vm_tests --junitxml $results/unit.xml ${ARGS:-}
report unit $?
# tests/wheels creates this environment, unless ARGS deselects it.
installed=$PWD/.rig/wheels/linux/bin/ndpy
if [ -x "$installed" ] || [ -z "${ARGS:-}" ]; then export NDPY_INSTALLED="$installed"; fi
on_adapter rxe rxe0 tests/contract tests/interop tests/examples tests/verbs
if ! has_siw; then
    echo "== no tests on siw0: this machine has no siw module"
elif [ -n "${NDPY_STRESS:-}" ]; then
    on_adapter siw siw0 tests/contract tests/interop tests/verbs tests/examples
else
    # tests/verbs starts dozens of processes, which takes minutes in the VM.
    on_adapter siw siw0 tests/contract tests/interop
fi
begin "tests in the background"
wait $background
status=$?
cat $results/background.log
report background $status

$python rig/sum_results.py $results/*.xml
begin "end"
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
