# What the machine itself needs: packages, a kernel for the VM, soft-iWARP. Read by setup.sh.

if [ "$(id -u)" = 0 ]; then as_root=; else as_root=sudo; fi
export DEBIAN_FRONTEND=noninteractive
export PATH="$PATH:/usr/sbin:/sbin"

# apt-get update, at most once in a run: package lists of a fresh machine are absent or old.
update_lists() {
    [ -z "${lists_updated:-}" ] || return 0
    lists_updated=1
    say "updating the package lists"
    $as_root apt-get -qq update
}

apt_install() {
    update_lists
    $as_root apt-get -qq -o Dpkg::Use-Pty=0 install --no-install-recommends -y "$@" >"$state/apt.log" 2>&1 ||
        { tail -n 20 "$state/apt.log" >&2; return 1; }
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

install_packages() {
    command -v apt-get >/dev/null || die "this is for Debian and Ubuntu; install what rig/packages.txt lists"
    command -v sudo >/dev/null || [ -z "$as_root" ] || die "run this as root, or install sudo"
    [ "$(dpkg --print-architecture)" = amd64 ] || die "the VM is made for amd64 only"
    wanted=$(sed 's/#.*//' "$rig/packages.txt")
    absent=
    for package in $wanted; do
        name=${package%\?}
        if installed "$name"; then continue; fi
        if [ "$name" != "$package" ] && { update_lists; ! available "$name"; }; then continue; fi
        absent="$absent $name"
    done
    if [ -n "$absent" ]; then
        say "installing$absent"
        apt_install $absent || die "the packages could not be installed"
    fi
}

has_rxe() {
    for file in "/lib/modules/$1"/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*; do [ ! -e "$file" ] || return 0; done
    return 1
}

has_siw() {
    for file in "/lib/modules/$1"/updates/siw.ko* "/lib/modules/$1"/updates/*/siw.ko* \
        "/lib/modules/$1"/kernel/drivers/infiniband/sw/siw/siw.ko*; do
        [ ! -e "$file" ] || return 0
    done
    return 1
}

# The version of the newest kernel that has rxe or siw ($1) and an image we can read, or nothing.
# ndpy.softroce.tools.find_kernel makes the same choice.
usable_kernel() {
    for modules in $(ls -d /lib/modules/*/ 2>/dev/null | sort -V -r); do
        version=$(basename "$modules")
        "has_$1" "$version" || continue
        for image in "${modules}vmlinuz" "/boot/vmlinuz-$version"; do
            if [ -r "$image" ]; then echo "$version"; return; fi
        done
    done
}

available() { apt-cache show --no-all-versions "$1" 2>/dev/null | grep -q "^Filename:"; }

# The kernel version behind the distribution's general kernel package. Ubuntu's is called generic;
# Debian's cloud flavour and Ubuntu's kvm flavour lack rdma_rxe, so they are never asked for.
archive_kernel() {
    for meta in linux-image-amd64 linux-image-generic; do
        apt-cache depends --important "$meta" 2>/dev/null |
            sed -n 's/^ *Depends: linux-image-\([0-9].*\)$/\1/p' | head -n 1
    done | head -n 1
}

# Image and modules are unpacked, not installed: nothing of how this machine boots is touched.
# They have to be in /lib/modules/VERSION, since the VM has this machine's files as its own.
provide_kernel() {
    kernel=$(usable_kernel rxe)
    [ -z "$kernel" ] || return 0
    update_lists
    kernel=$(archive_kernel)
    [ -n "$kernel" ] || die "the archive has neither linux-image-amd64 nor linux-image-generic"
    say "unpacking kernel $kernel for the VM"
    work=$state/kernel
    rm -rf "$work"
    mkdir -p "$work/root"
    packages=
    # Debian 7.2 and later have the image in linux-binary, the modules in linux-modules and their lists in linux-base; Ubuntu too
    # has modules of their own.
    for package in "linux-image-$kernel" "linux-binary-$kernel" "linux-base-$kernel" "linux-modules-$kernel" \
        "linux-modules-extra-$kernel"; do
        if available "$package"; then packages="$packages $package"; fi
    done
    (cd "$work" && apt-get -qq download $packages 2>"$state/download.log") ||
        { cat "$state/download.log" >&2; die "the kernel could not be downloaded"; }
    for file in "$work"/*.deb; do dpkg-deb -x "$file" "$work/root"; done

    $as_root mkdir -p "/lib/modules/$kernel"
    for modules in "$work/root/lib/modules/$kernel" "$work/root/usr/lib/modules/$kernel"; do
        [ ! -d "$modules" ] || $as_root cp -a --no-clobber "$modules/." "/lib/modules/$kernel/"
    done
    if [ -e "$work/root/boot/vmlinuz-$kernel" ]; then
        $as_root cp "$work/root/boot/vmlinuz-$kernel" "/lib/modules/$kernel/vmlinuz"
    fi
    $as_root chmod a+r "/lib/modules/$kernel/vmlinuz"
    $as_root depmod "$kernel"
    rm -rf "$work"
    [ "$(usable_kernel rxe)" = "$kernel" ] || die "kernel $kernel has no rdma_rxe"
}

# Debian's kernel is built without siw, but its source package has it. Without siw there is no siw0 on this kernel:
# `ndpy softroce run --adapter siw` takes the newest one that has it. Everything else works.
provide_siw() {
    ! has_siw "$kernel" || return 0
    given_up=$state/no-siw-$kernel
    if [ -e "$given_up" ]; then return 0; fi
    say "building siw for kernel $kernel (soft-iWARP)"
    if ! build_siw >"$state/siw.log" 2>&1; then
        tail -n 5 "$state/siw.log" >&2
        other=$(usable_kernel siw)
        if [ -n "$other" ]; then other="siw0 comes with kernel $other"; else other="there will be no siw0"; fi
        say "siw could not be built for kernel $kernel (remove $given_up to try again): $other"
        touch "$given_up"
    fi
}

build_siw() {
    series=$(echo "$kernel" | sed 's/^\([0-9]*\.[0-9]*\).*/\1/')
    source=linux-source-$series
    update_lists || return 1
    available "$source" && available "linux-headers-$kernel" || return 1
    headers=/usr/src/linux-headers-$kernel
    if [ ! -e "$headers/Makefile" ]; then apt_install "linux-headers-$kernel" || return 1; fi
    work=$state/siw
    rm -rf "$work"
    mkdir -p "$work"
    (cd "$work" && apt-get -qq download "$source") || return 1
    # Only one folder is wanted of the 1.3 GB in the archive inside the package.
    dpkg-deb --fsys-tarfile "$work"/linux-source-*.deb | tar -x -O -f - "./usr/src/$source.tar.xz" |
        xz -d -T 0 | tar -x -C "$work" --wildcards --strip-components=1 -f - '*/drivers/infiniband/sw/siw'
    siw=$work/drivers/infiniband/sw/siw
    make -C "$headers" M="$siw" CONFIG_RDMA_SIW=m modules || return 1
    strip --strip-debug "$siw/siw.ko" || return 1
    $as_root mkdir -p "/lib/modules/$kernel/updates" &&
        $as_root cp "$siw/siw.ko" "/lib/modules/$kernel/updates/siw.ko" &&
        $as_root depmod "$kernel" || return 1
    rm -rf "$work"
}
