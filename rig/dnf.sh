# Fedora's part of system.sh, which reads this: packages and kernels with dnf and rpm.

manager=dnf
package_column=2

for_this_machine() { [ "$(uname -m)" = x86_64 ]; }

update() { $as_root dnf -q makecache; }

install_now() {
    update_lists
    $as_root dnf -q -y --setopt=install_weak_deps=False install "$@" >"$state/dnf.log" 2>&1 ||
        { tail -n 20 "$state/dnf.log" >&2; return 1; }
}

installed() { rpm -q --quiet --whatprovides "$1" 2>/dev/null; }

package_version() { rpm -q "$1"; }

available() { dnf -q repoquery "$1" 2>/dev/null | grep -q .; }

# Downloads packages into this folder.
download() { dnf -q download "$@"; }

# Unpacks the packages of the folder $1 into the folder $2.
unpack() {
    for file in "$1"/*.rpm; do
        rpm2cpio "$file" | (cd "$2" && cpio -i -d -m --quiet --no-absolute-filenames) || return 1
    done
}

# The newest kernel of the archive. dnf 5 ends no line itself. dnf 4 does, which leaves empty lines, and those sort first.
archive_kernel() {
    dnf -q repoquery --latest-limit=1 --arch=x86_64 --qf '%{version}-%{release}.%{arch}\n' kernel-core 2>/dev/null |
        sort -V | tail -n 1
}
no_archive_kernel="the archive has no kernel-core"

# The image is in kernel-core; rdma_rxe and siw are in kernel-modules.
kernel_packages() { echo "kernel-core-$1 kernel-modules-core-$1 kernel-modules-$1"; }

# Fedora's kernels have siw. There is nothing to build it from for one that has not.
build_siw() {
    echo "siw is expected in kernel-modules-$kernel"
    return 1
}
