# Debian's and Ubuntu's part of system.sh, which reads this: packages and kernels with apt and dpkg.

export DEBIAN_FRONTEND=noninteractive
manager=apt-get
package_column=1

for_this_machine() { [ "$(dpkg --print-architecture)" = amd64 ]; }

update() { $as_root apt-get -qq update; }

install_now() {
    update_lists
    $as_root apt-get -qq -o Dpkg::Use-Pty=0 install --no-install-recommends -y "$@" >"$state/apt.log" 2>&1 ||
        { tail -n 20 "$state/apt.log" >&2; return 1; }
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

package_version() { dpkg-query -W -f '${Package} ${Version}\n' "$1"; }

available() { apt-cache show --no-all-versions "$1" 2>/dev/null | grep -q "^Filename:"; }

# Downloads packages into this folder.
download() { apt-get -qq download "$@"; }

# Unpacks the packages of the folder $1 into the folder $2.
unpack() { for file in "$1"/*.deb; do dpkg-deb -x "$file" "$2" || return 1; done; }

# The kernel version behind the distribution's general kernel package. Ubuntu's is called generic;
# Debian's cloud flavour and Ubuntu's kvm flavour lack rdma_rxe, so they are never asked for.
archive_kernel() {
    for meta in linux-image-amd64 linux-image-generic; do
        apt-cache depends --important "$meta" 2>/dev/null |
            sed -n 's/^ *Depends: linux-image-\([0-9].*\)$/\1/p' | head -n 1
    done | head -n 1
}
no_archive_kernel="the archive has neither linux-image-amd64 nor linux-image-generic"

# Debian 7.2 and later have the image in linux-binary, the modules in linux-modules and their lists in linux-base; Ubuntu too
# has modules of their own.
kernel_packages() {
    echo "linux-image-$1 linux-binary-$1 linux-base-$1 linux-modules-$1 linux-modules-extra-$1"
}

# Debian's kernel is built without siw, but its source package has it.
build_siw() {
    series=$(echo "$kernel" | sed 's/^\([0-9]*\.[0-9]*\).*/\1/')
    source=linux-source-$series
    update_lists || return 1
    available "$source" && available "linux-headers-$kernel" || return 1
    headers=/usr/src/linux-headers-$kernel
    if [ ! -e "$headers/Makefile" ]; then install_now "linux-headers-$kernel" || return 1; fi
    work=$state/siw
    rm -rf "$work"
    mkdir -p "$work"
    (cd "$work" && download "$source") || return 1
    # Only one folder is wanted of the 1.3 GB in the archive inside the package.
    dpkg-deb --fsys-tarfile "$work"/linux-source-*.deb | tar -x -O -f - "./usr/src/$source.tar.xz" |
        xz -d -T 0 | tar -x -C "$work" --wildcards --strip-components=1 -f - '*/drivers/infiniband/sw/siw'
    siw=$work/drivers/infiniband/sw/siw
    make -C "$headers" M="$siw" CONFIG_RDMA_SIW=m modules || return 1
    strip --strip-debug "$siw/siw.ko" || return 1
    $as_root mkdir -p "$root/lib/modules/$kernel/updates" &&
        $as_root cp "$siw/siw.ko" "$root/lib/modules/$kernel/updates/siw.ko" &&
        $as_root depmod "$kernel" || return 1
    rm -rf "$work"
}
