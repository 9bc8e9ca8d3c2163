#!/bin/sh
# Provides .rig/aarch64/python, which runs a Python for aarch64 with a wheel of ndpy: QEMU's emulation of programs, and Debian's Python.
# All of it is unpacked into .rig/aarch64. Nothing of this machine is changed.
#
#   rig/aarch64.sh WHEEL
#
# Ends with status 3 if Debian's packages cannot be fetched. In the checkout that Python imports the checkout's ndpy; it runs in
# .rig/aarch64/empty.

set -u
cd "$(dirname "$0")/.."
wheel=${1:?a wheel for aarch64}
state=$PWD/.rig/aarch64
emulator=$state/emulator/usr/bin/qemu-aarch64
mkdir -p "$state/empty"

die() { echo "aarch64: $*" >&2; exit 3; }

. rig/debian_archive.sh

# Unpacks packages of the architecture $2 into .rig/aarch64/$1: those that follow, and what they depend on.
provide() {
    name=$1 architecture=$2
    shift 2
    [ ! -d "$state/$name" ] || return 0
    echo "aarch64: unpacking $* for $architecture, in .rig/aarch64/$name" >&2
    apt=$state/apt-stable work=$state/work
    rm -rf "$work" "$apt"
    read_suite stable
    with_apt stable apt-get install --download-only --no-install-recommends -y "$@" >"$apt/log" 2>&1 ||
        { tail -n 5 "$apt/log" >&2; die "$* could not be downloaded"; }
    for folder in bin lib; do mkdir -p "$work/usr/$folder" && ln -s "usr/$folder" "$work/$folder"; done
    for file in "$apt"/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$file" | tar -x -C "$work" --keep-directory-symlink || die "$file cannot be unpacked"
    done
    rm -r "$apt"
    mv "$work" "$state/$name"
}

# The libraries of RDMA are for the tests of what the system has. soft0 needs none.
provide emulator amd64 qemu-user
provide root arm64 python3 libibverbs1 librdmacm1

# pip does not know that a wheel for an older C library fits.
platforms=$(for minor in $(seq 17 41); do echo "--platform manylinux_2_${minor}_aarch64"; done)
version=$(basename "$(readlink "$state/root/usr/bin/python3")")
rm -rf "$state/packages"
.venv/bin/python -m pip --disable-pip-version-check --quiet install --target "$state/packages" --only-binary :all: \
    $platforms --implementation cp --python-version "${version#python}" \
    "$wheel" 'pytest>=8' 'pytest-timeout>=2.3' || exit 1

# Programs of this architecture start others by this script, which is sys.executable there.
python=$state/python
cat >"$python" <<END
#!/bin/sh
export PYTHONHOME="$state/root/usr" PYTHONPATH="$state/packages" PYTHONDONTWRITEBYTECODE=1
exec "$emulator" -0 "$python" -L "$state/root" "$state/root/usr/bin/python3" "\$@"
END
chmod +x "$python"
