#!/bin/sh
# Provides a free-threaded CPython in .rig/freethreaded/python, from Debian's source package, and an environment of it with
# ndpy's modules in .rig/freethreaded/venv. Nothing of this machine is changed: apt works in folders of its own. A second run takes a second.
#
#   rig/freethreaded.sh           that
#   rig/freethreaded.sh tsan      the same with ThreadSanitizer in the interpreter and in the modules, in .rig/freethreaded-tsan
#
# VERSION=3.15 chooses another Python than the newest of 3.14 and 3.13 that Debian's archive has. It needs the packages libffi-dev,
# libssl-dev and zlib1g-dev.

set -eu
cd "$(dirname "$0")/.."
case ${1:-} in
'') folder=$PWD/.rig/freethreaded options= ;;
tsan) folder=$PWD/.rig/freethreaded-tsan options=--with-thread-sanitizer ;;
*) echo "freethreaded: unknown part $1" >&2; exit 2 ;;
esac
state=$PWD/.rig/freethreaded

say() { echo "freethreaded: $*" >&2; }
die() { say "$*"; exit 1; }

. rig/debian_archive.sh

source_of() {
    ls "$state"/python"$1"_*.orig.tar.* 2>/dev/null | grep -v '\.asc$' | tail -n 1
}

# Sets archive to the source, which is downloaded unless it is there. Debian's patches are for Debian's packages.
provide_source() {
    for version in ${VERSION:-3.14 3.13}; do
        archive=$(source_of "$version")
        [ -z "$archive" ] || return 0
        # A source may leave the archive before it leaves the lists of a suite.
        for suite in testing unstable; do
            read_suite $suite deb-src
            # A download that was cut off leaves a part of the archive.
            rm -rf "$state/download"
            mkdir "$state/download"
            (cd "$state/download" && with_apt $suite apt-get source --download-only "python$version" >"$state/log" 2>&1) || continue
            mv "$state/download"/* "$state"
            archive=$(source_of "$version")
            return 0
        done
    done
    tail -n 5 "$state/log" >&2
    die "Debian's archive has no source of a Python that can be built"
}

build_python() {
    provide_source
    say "building $(basename "$archive") without the GIL, which takes some minutes"
    work=$folder/work
    rm -rf "$work" "$folder/python" "$folder/venv"
    mkdir -p "$work"
    tar -x -C "$work" --strip-components=1 -f "$archive" ||
        { rm "$archive"; die "$archive was damaged and is removed; run this again to fetch it"; }
    (
        cd "$work"
        # ThreadSanitizer finds races in the interpreter that builds it, which must not end the build.
        export TSAN_OPTIONS="report_bugs=0 exitcode=0"
        ./configure --prefix="$folder/python" --disable-gil --disable-test-modules $options &&
            nice -n 15 make -j "${JOBS:-2}" OPT='-DNDEBUG -O1' && nice -n 15 make install OPT='-DNDEBUG -O1'
    ) >"$folder/log" 2>&1 || { tail -n 20 "$folder/log" >&2; die "it could not be built"; }
    "$folder/python/bin/python3" -c 'import ctypes, ssl, zlib' || die "install libffi-dev, libssl-dev and zlib1g-dev"
    rm -rf "$work"
    basename "$archive" >"$folder/built"
}

# cffi says that it needs 3.14 of a free-threaded Python. Its sources work with 3.13 as well. Python 3.13 cannot even download them,
# because pip asks them for their dependencies.
install_cffi() {
    if [ -z "$options" ] && "$folder/venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 14))'; then
        $pip install 'cffi>=2'
        return
    fi
    work=$folder/cffi
    rm -rf "$work"
    mkdir -p "$work"
    .venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps --no-binary cffi -d "$work" 'cffi>=2'
    tar -x -C "$work" --strip-components=1 -f "$work"/cffi-*.tar.gz
    sed -i '/^if FREE_THREADED_BUILD/s/(3, 14)/(3, 13)/' "$work/setup.py"
    $pip install --no-build-isolation "$work"
}

# What the environment depends on: a change of any of it makes ndpy's modules again.
environment_key() {
    {
        cat "$folder/built"
        find pyproject.toml setup.py cdefs rig/freethreaded.sh -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum
    } | sha256sum
}

make_environment() {
    key=$(environment_key)
    [ "$key" != "$(cat "$folder/stamp" 2>/dev/null)" ] || return 0
    say "the environment $folder/venv"
    [ -x "$folder/venv/bin/python" ] || "$folder/python/bin/python3" -m venv "$folder/venv"
    $pip install 'setuptools>=77' 'pytest>=8' 'pytest-timeout>=2.3' 'click>=8.1' 'rich>=13' 'psutil>=5.9'
    # Its newest release may have no wheel for this Python, and takes very long to build.
    $pip install --only-binary numpy 'numpy>=1.24'
    "$folder/venv/bin/python" -c 'import cffi' 2>/dev/null || install_cffi
    # rig/sanitized.sh builds them with ThreadSanitizer, in a folder of its own.
    if [ -z "$options" ]; then
        $pip install --no-build-isolation --no-deps --config-settings editable_mode=compat --editable .
    fi
    echo "$key" >"$folder/stamp"
}

mkdir -p "$state" "$folder"
[ -e "$folder/built" ] || build_python
pip="nice -n 15 $folder/venv/bin/python -m pip --disable-pip-version-check --quiet"
make_environment
