# What the machine itself needs: packages, a kernel for the VM, soft-iWARP. Read by setup.sh.
# apt.sh or dnf.sh has what differs between package managers.

# Tests look at another root folder than this machine's.
root=${NDPY_SETUP_ROOT:-}

if [ "$(id -u)" = 0 ]; then as_root=; else as_root=sudo; fi
export PATH="$PATH:/usr/sbin:/sbin"

# The value of $1 in the release file. The file is data: it is not run as a script.
release_value() {
    for file in "$root/etc/os-release" "$root/usr/lib/os-release"; do
        if [ -f "$file" ] && [ -r "$file" ]; then
            tr '\000' '?' <"$file" | LC_ALL=C sed -n "s/^[[:blank:]]*$1=//p" | tail -n 1 |
                LC_ALL=C sed "s/[[:space:]]*$//; s/^\"\(.*\)\"$/\1/; s/^'\(.*\)'$/\1/"
            return
        fi
    done
}

# The family of this distribution, as in ndpy/platforms/verbs/distribution.py: debian, ubuntu, fedora, rhel, or nothing. Rebuilds of RHEL
# name it in ID_LIKE.
family() {
    # Without -f the shell would take a * in the file for names of files.
    (
        set -f
        for word in $(release_value ID) $(release_value ID_LIKE); do
            case $word in
            debian | ubuntu | fedora | rhel) echo "$word"; return ;;
            esac
        done
    )
}

case $(family) in
debian | ubuntu) . "$rig/apt.sh" ;;
fedora) . "$rig/dnf.sh" ;;
rhel) die "RHEL and its rebuilds have kernels without rdma_rxe and no package with qemu-system-x86_64, so there can be no VM" \
    "here; rig/setup.sh venv makes only .venv" ;;
*)
    id=$(release_value ID | LC_ALL=C tr -c 'A-Za-z0-9._\n-' '?' | cut -c 1-40)
    if [ -n "$id" ]; then said="/etc/os-release says ID=$id"; else said="there is no ID in /etc/os-release"; fi
    die "this is for Debian, Ubuntu and Fedora, but $said; install what rig/packages.txt lists, under the names that it has" \
        "here, and a kernel with rdma_rxe; then rig/setup.sh venv makes .venv"
    ;;
esac

# At most once in a run: package lists of a fresh machine are absent or old.
update_lists() {
    [ -z "${lists_updated:-}" ] || return 0
    lists_updated=1
    say "updating the package lists"
    update
}

# The names of packages.txt for this package manager. build: only those of its first paragraph.
wanted_packages() {
    sed '/^#/d; s/#.*//' "$rig/packages.txt" | while read -r first second; do
        case $package_column in 1) name=$first ;; *) name=$second ;; esac
        if [ -n "$first" ]; then begun=1; elif [ -n "${begun:-}" ] && [ "${1:-}" = build ]; then break; fi
        case $name in '' | -) ;; *) echo "$name" ;; esac
    done
}

# Installs all packages. build: only those for building.
install_packages() {
    command -v "$manager" >/dev/null || die "$manager is missing; install what rig/packages.txt lists"
    command -v sudo >/dev/null || [ -z "$as_root" ] || die "run this as root, or install sudo"
    for_this_machine || die "the VM is made for amd64 only"
    absent=
    for package in $(wanted_packages "$@"); do
        name=${package%\?}
        if installed "$name"; then continue; fi
        if [ "$name" != "$package" ] && { update_lists; ! available "$name"; }; then continue; fi
        absent="$absent $name"
    done
    if [ -n "$absent" ]; then
        say "installing$absent"
        install_now $absent || die "the packages could not be installed"
    fi
}

# Whether one of these files exists.
exists() {
    for file; do [ ! -e "$file" ] || return 0; done
    return 1
}

has_rxe() { exists "$root/lib/modules/$1"/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*; }

has_siw() {
    exists "$root/lib/modules/$1"/updates/siw.ko* "$root/lib/modules/$1"/updates/*/siw.ko* \
        "$root/lib/modules/$1"/kernel/drivers/infiniband/sw/siw/siw.ko*
}

# The version of the newest kernel that has rxe or siw ($1) and an image we can read, or nothing.
# ndpy.tools.machines.tools.find_kernel makes the same choice.
usable_kernel() {
    for modules in $(ls -d "$root"/lib/modules/*/ 2>/dev/null | sort -V -r); do
        version=$(basename "$modules")
        "has_$1" "$version" || continue
        for image in "${modules}vmlinuz" "$root/boot/vmlinuz-$version"; do
            if [ -r "$image" ]; then echo "$version"; return; fi
        done
    done
}

# The version of the newest kernel that has rxe, and an image in /boot that only root may read, or nothing. Ubuntu's are so.
closed_kernel() {
    for modules in $(ls -d "$root"/lib/modules/*/ 2>/dev/null | sort -V -r); do
        version=$(basename "$modules")
        if has_rxe "$version" && [ -e "$root/boot/vmlinuz-$version" ]; then echo "$version"; return; fi
    done
}

# Gives the kernel $1 a copy of the image $2 that everybody may read, where the VM looks for it. With the image the kernel is whole.
copy_image() {
    $as_root cp "$2" "$root/lib/modules/$1/vmlinuz.part"
    $as_root chmod a+r "$root/lib/modules/$1/vmlinuz.part"
    $as_root mv "$root/lib/modules/$1/vmlinuz.part" "$root/lib/modules/$1/vmlinuz"
}

provide_kernel() {
    kernel=$(usable_kernel rxe)
    [ -z "$kernel" ] || return 0
    kernel=$(closed_kernel)
    if [ -n "$kernel" ]; then
        say "copying the image of kernel $kernel, which only root may read, to /lib/modules/$kernel/vmlinuz"
        copy_image "$kernel" "$root/boot/vmlinuz-$kernel"
    else
        unpack_kernel
    fi
    [ "$(usable_kernel rxe)" = "$kernel" ] || die "kernel $kernel has no rdma_rxe"
}

# Image and modules are unpacked, not installed: nothing of how this machine boots is touched.
# They have to be in /lib/modules/VERSION, since the VM has this machine's files as its own.
unpack_kernel() {
    update_lists
    kernel=$(archive_kernel)
    [ -n "$kernel" ] || die "$no_archive_kernel"
    say "unpacking kernel $kernel for the VM"
    work=$state/kernel
    rm -rf "$work"
    mkdir -p "$work/root"
    packages=
    for package in $(kernel_packages "$kernel"); do
        if available "$package"; then packages="$packages $package"; fi
    done
    (cd "$work" && download $packages 2>"$state/download.log") ||
        { cat "$state/download.log" >&2; die "the kernel could not be downloaded"; }
    unpack "$work" "$work/root" || die "the kernel could not be unpacked"

    # The image comes last: a set-up that was cut off before it starts again.
    image=$work/vmlinuz
    for place in "$work/root/boot/vmlinuz-$kernel" "$work/root/lib/modules/$kernel/vmlinuz" "$work/root/usr/lib/modules/$kernel/vmlinuz"; do
        [ ! -e "$place" ] || mv "$place" "$image"
    done
    $as_root mkdir -p "$root/lib/modules/$kernel"
    for modules in "$work/root/lib/modules/$kernel" "$work/root/usr/lib/modules/$kernel"; do
        [ ! -d "$modules" ] || $as_root cp -a --no-clobber "$modules/." "$root/lib/modules/$kernel/"
    done
    $as_root depmod "$kernel"
    [ ! -e "$image" ] || copy_image "$kernel" "$image"
    rm -rf "$work"
}

# Without siw there is no siw0 on this kernel: `ndpy vm run --adapter siw` takes the newest one that has it. Everything
# else works.
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
