#!/bin/sh
# Makes a fresh Debian or Ubuntu machine ready for ndpy's tests: packages, a kernel with software
# adapters for the VM, and a virtual environment. Run it as root or as a user who may use sudo.
# Running it again costs a second; it does only what is missing.
#
#   rig/setup.sh            everything
#   rig/setup.sh venv       only the virtual environment .venv (PYTHON=python3.12 chooses another Python)

set -eu
cd "$(dirname "$0")/.."
rig=$PWD/rig
state=$PWD/.rig
mkdir -p "$state"

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

. "$rig/venv.sh"

case ${1:-all} in
venv) make_venv ;;
all)
    . "$rig/system.sh"
    install_packages
    provide_kernel
    provide_siw
    make_venv
    ;;
*) die "unknown part $1" ;;
esac
