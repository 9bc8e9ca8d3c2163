#!/bin/sh
# Unpacks the newest kernels of Debian's suites into .rig/kernels, for `ndpy softroce run --kernel-root`. Nothing of this machine is
# changed: apt works in folders of its own.
#
#   rig/kernels.sh SUITE...     stable, testing or unstable; prints "SUITE VERSION FOLDER" for each
#
# A kernel that is there already is not downloaded again.

set -eu
cd "$(dirname "$0")/.."
state=$PWD/.rig/kernels
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

die() { echo "kernels: $*" >&2; exit 1; }

command -v apt-get >/dev/null || die "the kernels of Debian are fetched with apt-get, which this machine does not have"

# The mirror that this machine uses, or Debian's own.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep '/debian/*$' | head -n 1)
mirror=${mirror:-http://deb.debian.org/debian}
[ -e $keyring ] || die "Debian's keys are missing; install the package debian-archive-keyring"

# apt with lists of its own for the suite $1. An empty list of installed packages keeps it from this machine's.
apt_folder() { echo "$state/apt-$1"; }
with_apt() {
    folder=$(apt_folder "$1")
    program=$2
    shift 2
    "$program" -q -o Dir::State="$folder/state" -o Dir::State::status="$folder/status" -o Dir::Cache="$folder/cache" \
        -o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts="$folder/none" \
        -o Dir::Etc::preferences="$folder/none" -o Dir::Etc::preferencesparts="$folder/none" \
        -o Acquire::Languages=none -o APT::Architecture=amd64 -o APT::Sandbox::User=root "$@"
}

update() {
    folder=$(apt_folder "$1")
    mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial" "$folder/none"
    : >"$folder/status"
    echo "deb [signed-by=$keyring] $mirror $1 main" >"$folder/sources.list"
    # The newest kernel of stable is in the archive of security updates.
    if [ "$1" = stable ]; then
        echo "deb [signed-by=$keyring] ${mirror%/}-security stable-security main" >>"$folder/sources.list"
    fi
    with_apt "$1" apt-get update >"$folder/log" 2>&1 || { tail -n 5 "$folder/log" >&2; die "the lists of $1 could not be read"; }
}

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
    update "$suite"
    kernel=$(with_apt "$suite" apt-cache show --no-all-versions linux-image-amd64 2>/dev/null |
        sed -n 's/^Depends:.*linux-image-\([0-9][^ ,]*\).*/\1/p')
    [ -n "$kernel" ] || die "$suite has no linux-image-amd64"
    if [ ! -d "$state/$kernel" ]; then
        echo "kernels: unpacking $kernel of Debian $suite" >&2
        unpack "$suite" "$kernel"
    fi
    echo "$suite $kernel $state/$kernel"
done
