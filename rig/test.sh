#!/bin/sh
# Runs all the tests, for `make test`, which sets the machine up first:
#
# Three rows of parts run side by side. Programs under Wine and tests without a VM wait more than they compute.
#
#   the first row    on this machine the tests on soft0, then tests/unit, tests/machines and tests/wheels; then, in a VM, those
#                    that need an adapter on rxe0
#   wine             rig/test-softnd.sh and rig/test-windows.sh; then, in VMs, the tests on siw0 and two hosts with siw; with
#                    NDPY_STRESS=1 rig/test-aarch64.sh too
#   machines         rig/test-kernels.sh on the newest kernel, the VM's own tests, softnd against siw, and two hosts with rxe
#                    (rig/test-hosts.sh), all in VMs; then rig/test-softverbs.sh; with NDPY_STRESS=1 ten of the faults of
#                    tests/mutants/logic
#
# NDPY_STRESS=1 asks for full counts, which take about two hours: on soft0, on rxe0, under Wine and between two hosts with rxe. The
# other parts run all their modules then, with the usual counts except for random requests beside a model. ARGS goes to pytest.
# PARTS="unit rxe0" runs only these of the parts below. At the end, each part's time and slowest modules are printed.

set -u
parts="soft0 unit rxe0 softnd windows peers siw0 hosts-siw aarch64 newest-kernel vm softnd-siw hosts-rxe softverbs faults"
for part in ${PARTS:=$parts}; do
    case " $parts " in
    *" $part "*) ;;
    *) echo "PARTS: there is no part $part; there are: $parts" >&2; exit 2 ;;
    esac
done
wanted() { case " $PARTS " in *" $1 "*) ;; *) return 1 ;; esac; }

cd "$(dirname "$0")/.."
python=.venv/bin/python
results=.rig/results
mkdir -p $results
rm -rf $results/*.xml $results/*.log $results/*.failed .rig/wheels
# Three rows share the processors, and an emulated machine does not see how busy this one is. See tests/deadlines.py.
export NDPY_TEST_PATIENCE="${NDPY_TEST_PATIENCE:-3}"
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

# on_adapter KIND NAME PROCESSORS ...
on_adapter() {
    kind=$1 adapter=$2 cpus=$3
    shift 3
    begin "tests on $adapter"
    .venv/bin/ndpy softroce run ${SOFTROCE---vm} --adapter "$kind" --cpus "$cpus" --limit $limit -- \
        $python -m pytest "$@" --adapter "$adapter" \
        -p no:cacheprovider --junitxml "$results/$adapter.xml" ${ARGS:-}
}

on_soft() {
    begin "smoke test and tests on soft0"
    .venv/bin/ndpy smoke soft0 >$results/soft-smoke.log 2>&1
    status=$?
    if [ $status = 0 ]; then tail -n 1 $results/soft-smoke.log; else cat $results/soft-smoke.log; fi
    $python -m pytest $soft_tests --adapter soft0 -p no:cacheprovider --junitxml $results/soft0.xml ${ARGS:-} && return $status
}
# The examples and the tests of the smoke test start many processes, which is slow in the VM. On rxe the examples run between two
# hosts, and the smoke test with rig/test-kernels.sh.
soft_tests='tests/contract tests/interop tests/examples tests/networks tests/verbs/test_smoke.py'
rxe_tests='tests/contract tests/interop tests/verbs tests/networks/test_on_cables.py --ignore tests/verbs/test_smoke.py'
# Emulating a second processor costs half as much time again. The newest kernel and siw have two.
rxe_cpus=1
# tests/verbs starts dozens of processes, which takes minutes in the VM.
siw_tests='tests/contract tests/interop tests/networks/test_on_cables.py'
if [ -n "${NDPY_STRESS:-}" ]; then
    soft_tests='tests/contract tests/interop tests/examples tests/verbs tests/networks'
    rxe_tests='tests/contract tests/interop tests/examples tests/verbs tests/networks/test_on_cables.py'
    siw_tests=$rxe_tests
fi

# tests/wheels creates this environment, unless ARGS deselects it.
installed=$PWD/.rig/wheels/linux/bin/ndpy
name_installed() { if [ -x "$installed" ] || [ -z "${ARGS:-}" ]; then export NDPY_INSTALLED="$installed"; fi; }

# What the usual run leaves out on some drivers, because it does not depend on them. It runs on soft0 and on rxe0.
leave_out() { for module; do echo "--ignore tests/contract/test_$module.py"; done; }
not_on_newest=$(leave_out \
    aio_closed_peers aio_crowd aio_ctrl_c aio_dropped aio_hostile aio_unequal_ends copies_of_objects foreign_regions layouts_of_memory names ndk \
    outstanding pending registration_cache_exposures registration_cache_merging timeouts)
not_on_siw="$not_on_newest $(leave_out alloc registration_cache_fuzz registration_cache_threads)
    --deselect tests/networks/test_on_cables.py::test_a_listener_of_one_adapter_takes_peers_of_all_its_subnets
    --deselect tests/networks/test_on_cables.py::test_an_adapter_on_a_bond_uses_it"
if [ -n "${NDPY_STRESS:-}" ]; then not_on_newest= not_on_siw=; fi
on_siw() {
    name_installed
    if ! has_siw; then
        echo "== no tests on siw0: this machine has no siw module"
    else
        on_adapter siw siw0 2 $siw_tests $not_on_siw
    fi
}

# Two hosts are two VMs, so this does not depend on SOFTROCE. With one processor each, rxe is as fast and siw sometimes hangs.
on_rxe_hosts() {
    begin "two hosts, rxe"
    LIMIT=$limit rig/test-hosts.sh rxe $rxe_hosts --junitxml $results/hosts-rxe.xml ${ARGS:-}
}
on_siw_hosts() {
    if ! has_siw; then return 0; fi
    begin "two hosts, siw"
    LIMIT=$limit CPUS=2 rig/test-hosts.sh siw $siw_hosts --junitxml $results/hosts-siw.xml ${ARGS:-}
}
if [ -n "${NDPY_STRESS:-}" ]; then
    rxe_hosts='tests/contract/test_connector.py tests/contract/test_listener.py tests/hosts'
    siw_hosts=$rxe_hosts
else
    # The contract's connection tests take a minute there on rxe and three on siw. They run within one VM.
    rxe_hosts=tests/hosts
    network=tests/hosts/test_network.py
    siw_hosts="tests/hosts/test_death.py $network::test_traffic_over_a_good_network
        $network::test_random_connections_over_a_lossy_network"
fi

on_newest_kernel() {
    begin "the newest kernel of Debian"
    KERNELS=unstable ARGS="$not_on_newest ${ARGS:-}" rig/test-kernels.sh
    status=$?
    if [ $status != 3 ]; then return $status; fi
    echo "== no tests on the newest kernel: it could not be fetched"
}

# tests/wheels builds the wheel, if the compiler is there.
on_aarch64() {
    wheel=$(echo .rig/wheels/dist/ndpy-*_aarch64.whl)
    if [ ! -e "$wheel" ]; then
        echo "== no tests on aarch64: no wheel was built for it"
        return 0
    fi
    begin "the wheel for aarch64"
    rig/test-aarch64.sh "$wheel"
    status=$?
    if [ $status != 3 ]; then return $status; fi
    echo "== no tests on aarch64: what they need could not be fetched"
}

# `softroce run --adapter siw` boots the newest kernel that has siw. That need not be the newest kernel.
has_siw() { $python -c 'from ndpy.tools.machines import tools; tools.find_kernel(adapters=("siw",))' 2>/dev/null; }

# Built here, so that the parts that need softnd.dll do not build it at the same time.
make -s -C softrdma build/softnd.dll || exit 1

vm_tests=tests/unit/test_softroce_vm.py
with_usual_counts() { (if [ -n "${NDPY_STRESS:-}" ]; then export NDPY_TEST_REQUESTS=100000; fi; unset NDPY_STRESS; "$@"); }
# Runs a part. What a part of another row than the first one printed is kept, because its end is printed at the end again if it failed.
part() {
    wanted "$1" || return 0
    name=$1
    shift
    if [ $row = first ]; then "$@"; else "$@" >"$results/part-$name.log" 2>&1; fi
    status=$?
    if [ $row != first ]; then cat "$results/part-$name.log"; fi
    if [ $status != 0 ]; then failed="$failed $name"; fi
}
tests_of_the_vm() {
    begin "tests of the VM"
    $python -m pytest $vm_tests --junitxml $results/vm.xml ${ARGS:-}
}
softnd_and_siw() {
    begin "softnd, soft0 and siw"
    rig/test-softnd.sh siw
}
under_sanitizers() {
    begin "softverbs under sanitizers"
    rig/test-softverbs.sh
}
ten_faults() {
    begin "ten faults of logic"
    $python tests/mutants/logic.py --count 10 --seed 1 --jobs 1
}
without_an_adapter() {
    begin "tests without an adapter"
    $python -m pytest tests/unit tests/machines tests/wheels --ignore $vm_tests --junitxml $results/unit.xml ${ARGS:-}
}
on_rxe() {
    name_installed
    on_adapter rxe rxe0 $rxe_cpus $rxe_tests
}
first() {
    part soft0 on_soft # first, because it finds most mistakes in a minute
    part unit without_an_adapter
    part rxe0 on_rxe
}
wine() {
    part softnd rig/test-softnd.sh windows
    part windows rig/test-windows.sh
    part peers rig/test-softnd.sh peers
    part siw0 with_usual_counts on_siw
    part hosts-siw with_usual_counts on_siw_hosts
    if [ -n "${NDPY_STRESS:-}" ]; then part aarch64 with_usual_counts on_aarch64; fi
}
machines() {
    part newest-kernel with_usual_counts on_newest_kernel
    part vm tests_of_the_vm
    part softnd-siw softnd_and_siw
    part hosts-rxe on_rxe_hosts
    part softverbs under_sanitizers
    if [ -n "${NDPY_STRESS:-}" ]; then part faults with_usual_counts ten_faults; fi
}
run_row() {
    row=$1
    $row
    begin "end of this row"
    echo "$failed" >"$results/row-$row.failed"
}

# Every program that this run starts has the mark in its environment, wherever it goes: machines and peers leave the process group.
export NDPY_TEST_RUN="$$-$(date +%s%N)"
marked() { grep -l -s -F -z -x "NDPY_TEST_RUN=$NDPY_TEST_RUN" /proc/[0-9]*/environ | sed 's|/proc/||; s|/environ||'; }
end_all() {
    trap '' INT TERM
    # The rows first, so that they start nothing more. Then what they started has a second to end what it started itself.
    kill $jobs 2>/dev/null
    for signal in TERM TERM TERM TERM KILL KILL KILL; do
        processes=$(marked)
        [ -n "$processes" ] || break
        kill -$signal $processes 2>/dev/null
        sleep 0.25
    done
    exit 130
}
# All rows are jobs, because a shell runs a trap only when the program in its foreground has ended.
jobs=
trap end_all INT TERM
for row in wine machines; do
    run_row $row >$results/row-$row.log 2>&1 &
    jobs="$jobs $!"
done
run_row first </dev/null &
first=$!
jobs="$jobs $first"
wait $first
begin "the other rows"
wait $jobs
for row in first wine machines; do
    [ $row = first ] || cat $results/row-$row.log
    failed="$failed$(cat $results/row-$row.failed 2>/dev/null || echo " row-$row")"
done

$python rig/sum_results.py $results/*.xml $results/kernels/*.xml
for name in $failed; do
    if [ -e "$results/part-$name.log" ]; then
        echo "== the end of what $name printed"
        tail -n 10 "$results/part-$name.log"
    fi
done
begin "end"
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
