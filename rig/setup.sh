#!/bin/sh
# Prepares a fresh Debian, Ubuntu or Fedora machine for ndpy's tests. It provides packages, a kernel with software adapters for the
# VM, a virtual environment, and a Windows Python under Wine. Run it as root or as a user who may use sudo. It does only what
# is missing, so a second run takes a second.
#
#   rig/setup.sh            everything
#   rig/setup.sh soft       what soft0 needs: the packages for building, and .venv
#   rig/setup.sh docs       that, and what the documentation's site needs
#   rig/setup.sh browser    that, and a browser to look at the site
#   rig/setup.sh fleet      what `soft` needs, and what the tests of `ndpy fleet` start: Open MPI, MPICH, Slurm, ssh with ClusterShell, lldpd
#   rig/setup.sh venv       only the virtual environment .venv (PYTHON=python3.12 selects another Python)
#   rig/setup.sh bench      the other Python packages, in .rig/bench, that tests and `make bench` compare ndpy with
#   rig/setup.sh peers      .venv, and the programs that `make bench-peers` compares soft0 with
#   rig/setup.sh wine       only the packages, .venv, and the Windows Python in .rig/wine

set -eu
cd "$(dirname "$0")/.."
rig=$PWD/rig
state=$PWD/.rig
mkdir -p "$state"

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

. "$rig/venv.sh"
. "$rig/wine.sh"
. "$rig/bench.sh"

case ${1:-all} in
venv) make_venv ;;
soft)
    . "$rig/system.sh"
    install_packages build
    make_venv
    ;;
docs)
    . "$rig/system.sh"
    install_packages build
    installed graphviz || install_now graphviz || die "graphviz could not be installed"
    make_venv
    ;;
browser)
    "$0" docs
    . "$rig/system.sh"
    # Debian calls the driver chromium-driver, and Fedora chromedriver.
    command -v chromedriver >/dev/null || install_now chromium chromium-driver || install_now chromium chromedriver ||
        die "chromium could not be installed"
    .venv/bin/python -m pip --disable-pip-version-check --quiet install 'selenium>=4.20'
    ;;
fleet)
    "$0" soft
    . "$rig/system.sh"
    for mpi in openmpi mpich; do
        # Debian calls the package openmpi-bin, and Fedora openmpi.
        command -v mpirun.$mpi >/dev/null || install_now $mpi-bin || install_now $mpi || die "$mpi could not be installed"
    done
    # Debian has all of Slurm in one package, and Fedora one for each daemon.
    command -v slurmctld slurmd munged >/dev/null || install_now slurm-wlm munge ||
        install_now slurm-slurmctld slurm-slurmd munge || die "Slurm could not be installed"
    if ! [ -x /usr/sbin/sshd ]; then
        # The tests have servers of their own. A unit that is masked is not started by the package.
        [ -d /run/systemd/system ] && $as_root systemctl mask ssh.service ssh.socket sshd.service
        install_now openssh-server openssh-client || install_now openssh-server openssh-clients ||
            die "openssh-server could not be installed"
    fi
    if ! [ -x /usr/sbin/lldpd ]; then
        # The tests have daemons of their own.
        [ -d /run/systemd/system ] && $as_root systemctl mask lldpd.service
        install_now lldpd || die "lldpd could not be installed"
    fi
    .venv/bin/python -m pip --disable-pip-version-check --quiet install 'mpi4py>=4' 'ClusterShell>=1.9'
    ;;
all)
    . "$rig/system.sh"
    install_packages
    provide_kernel
    provide_siw
    make_venv
    provide_bench
    provide_wine
    "$rig/windows/extension.sh"
    ;;
wine)
    . "$rig/system.sh"
    install_packages
    make_venv
    provide_wine
    "$rig/windows/extension.sh"
    ;;
bench)
    . "$rig/system.sh"
    provide_bench
    ;;
peers)
    . "$rig/system.sh"
    install_now ucx-utils iperf3 perftest sockperf || die "ucx-utils, iperf3, perftest or sockperf could not be installed"
    make_venv
    ;;
*) die "unknown part $1" ;;
esac
