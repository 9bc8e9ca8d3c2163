#!/bin/sh
# Runs all tests: tests/unit and tests/wheels here, softnd's and ndpy's on Windows under Wine, the others in a VM on rxe0 and
# then in another one on siw0. `make test` sets the machine up before. NDPY_STRESS=1 asks for full counts, ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
results=.rig/results
mkdir -p $results
rm -rf $results/*.xml $results/*.log .rig/wheels
# For an emulated machine that hangs: a test that hangs ends by a limit of its own, and a busy machine takes its time.
if [ -n "${NDPY_STRESS:-}" ]; then limit=10800; else limit=3600; fi
failed=

# Compiled here, since the VM is slow at it, and where a test's module fails to import it shows at once.
unset PYTHONDONTWRITEBYTECODE
$python -m compileall -q ndpy tests examples
$python tests/programs.py || exit 1
$python -m pytest tests --collect-only -q >$results/collected.txt 2>&1 ||
    { cat $results/collected.txt; exit 1; }

report() { if [ "$2" != 0 ]; then failed="$failed $1"; fi; }

on_adapter() {
    kind=$1 adapter=$2
    shift 2
    echo "== tests on $adapter"
    .venv/bin/ndpy softroce run ${SOFTROCE---vm} --adapter "$kind" --limit $limit -- \
        $python -m pytest "$@" --adapter "$adapter" \
        -p no:cacheprovider --junitxml "$results/$adapter.xml" ${ARGS:-}
    report "$adapter" $?
}

# Not only in the newest kernel: `softroce run --adapter siw` boots the newest one that has it.
has_siw() { $python -c 'from ndpy.softroce import tools; tools.find_kernel(adapters=("siw",))' 2>/dev/null; }

# Here, so that the parts which need softnd.dll do not build it at the same time.
make -s -C softnd || exit 1

# What runs under Wine waits more than it computes, so it runs beside the others. Emulated machines do not run beside each
# other: on two processors that is much slower than one after the other.
{
    status=0
    rig/test-softnd.sh windows || status=1
    rig/test-windows.sh || status=1
    rig/test-softnd.sh peers || status=1
    exit $status
} >$results/windows.log 2>&1 &
windows=$!
# A background job of a shell ignores Ctrl-C.
trap 'kill $windows; exit 130' INT TERM

vm_tests=tests/unit/test_softroce_vm.py
echo "== tests without an adapter"
$python -m pytest tests/unit tests/wheels --ignore $vm_tests --junitxml $results/unit.xml ${ARGS:-}
report unit $?
# tests/wheels has made it, unless ARGS kept it from that.
installed=$PWD/.rig/wheels/linux/bin/ndpy
if [ -x "$installed" ] || [ -z "${ARGS:-}" ]; then export NDPY_INSTALLED="$installed"; fi
on_adapter rxe rxe0 tests/contract tests/interop tests/examples tests/verbs
wait $windows
status=$?
cat $results/windows.log
report windows $status
rig/test-softnd.sh siw
report softnd-siw $?
echo "== tests of the emulated machine itself"
$python -m pytest $vm_tests --junitxml $results/vm.xml ${ARGS:-}
report vm $?
if ! has_siw; then
    echo "== no tests on siw0: this machine has no siw module"
elif [ -n "${NDPY_STRESS:-}" ]; then
    on_adapter siw siw0 tests/contract tests/interop tests/verbs tests/examples
else
    # tests/verbs starts dozens of processes, which takes the emulated machine minutes.
    on_adapter siw siw0 tests/contract tests/interop
fi

$python rig/sum_results.py $results/*.xml
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
