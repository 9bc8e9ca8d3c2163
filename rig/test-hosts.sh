#!/bin/sh
# Runs tests on two hosts, VMs with a network between them: pytest on the first one, and on the second one a server through which the
# tests use ndpy there (tests/remote.py).
#
#   rig/test-hosts.sh rxe|siw [PYTEST ARGUMENTS]     without arguments: tests/hosts and the contract's connection tests
#
# CPUS: processors of each VM. LIMIT: seconds. KERNEL_ROOT: see `ndpy softroce run --kernel-root`. NDPY_STRESS=1 asks for full counts.

set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python
kind=${1:?rxe or siw}
shift
[ $# != 0 ] || set -- tests/contract/test_connector.py tests/contract/test_listener.py tests/hosts
port=7471
unset PYTHONDONTWRITEBYTECODE
$python -m compileall -q ndpy tests examples

exec .venv/bin/ndpy softroce run --hosts 2 --adapter "$kind" --cpus "${CPUS:-1}" --limit "${LIMIT:-1800}" \
    ${KERNEL_ROOT:+--kernel-root "$KERNEL_ROOT"} -- sh -c '
        if [ "$NDPY_HOST" = 2 ]; then exec '$python' tests/remote.py --listen "$NDPY_CONTROL_ADDRESS:'$port'"; fi
        exec '$python' -m pytest "$@" --adapter '"$kind"'0 --peer "$NDPY_PEER_CONTROL_ADDRESS:'$port'" -p no:cacheprovider
    ' sh "$@"
