#!/bin/sh
# Unpacks the newest kernels of Debian's suites into .rig/kernels, for `ndpy vm run --kernel-root`. Nothing of this machine is
# changed: apt works in folders of its own.
#
#   rig/kernels.sh SUITE...     stable, testing or unstable; prints "SUITE VERSION FOLDER" for each
#
# A kernel that is there already is not downloaded again. Ends with status 3 if a kernel cannot be fetched.

set -eu
cd "$(dirname "$0")/.."
state=$PWD/.rig/kernels

die() { echo "kernels: $*" >&2; exit 3; }

. rig/debian_archive.sh

# Packages of the kernel $2: one, or, since 7.2, image, modules and their lists.
packages() {
    for name in image binary base modules; do
        with_apt "$1" apt-cache show --no-all-versions "linux-$name-$2" 2>/dev/null | sed -n 's/^Package: //p'
    done
}

unpack() {
    work=$state/work
    rm -rf "$work"
    mkdir -p "$work/root"
    (cd "$work" && with_apt "$1" apt-get download $(packages "$1" "$2") >"$work/log" 2>&1) ||
        { tail -n 5 "$work/log" >&2; die "kernel $2 could not be downloaded"; }
    for file in "$work"/*.deb; do dpkg-deb -x "$file" "$work/root"; done
    [ -e "$work/root/lib" ] || ln -s usr/lib "$work/root/lib"
    PATH=$PATH:/usr/sbin:/sbin depmod -b "$work/root" "$2"
    mv "$work/root" "$state/$2"
    rm -rf "$work"
}

[ $# -gt 0 ] || die "name the suites: stable, testing or unstable"
mkdir -p "$state"
for suite; do
    read_suite "$suite"
    kernel=$(with_apt "$suite" apt-cache show --no-all-versions linux-image-amd64 2>/dev/null |
        sed -n 's/^Depends:.*linux-image-\([0-9][^ ,]*\).*/\1/p')
    [ -n "$kernel" ] || die "$suite has no linux-image-amd64"
    if [ ! -d "$state/$kernel" ]; then
        echo "kernels: unpacking $kernel of Debian $suite" >&2
        unpack "$suite" "$kernel"
    fi
    echo "$suite $kernel $state/$kernel"
done
