#!/bin/sh
# Cross-compiles ndpy/_networkdirect.pyd and ndpy/_core.pyd, the extension modules for Windows on x64, with MinGW-w64, if
# anything that they are made from has changed. abi3: they are linked with the python3.dll of rig/wine.sh's Python and need any
# CPython's headers; pyconfig.h here stands for Windows' own.

set -eu
cd "$(dirname "$0")/../.."
python=.venv/bin/python
compiler=x86_64-w64-mingw32-gcc
library=.rig/wine/python/python3.dll
work=build/windows
stamp=$work/stamp

# venv.sh's stamp stands for cffi and for Python's headers.
key=$({
    $compiler --version
    cat .venv/ndpy-stamp
    find cdefs rig/windows $library -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum
} | sha256sum)
if [ -e ndpy/_networkdirect.pyd ] && [ -e ndpy/_core.pyd ] && [ "$key" = "$(cat $stamp 2>/dev/null)" ]; then exit; fi

echo "setup: ndpy/_networkdirect.pyd and _core.pyd" >&2
mkdir -p $work
$python cdefs/build_networkdirect.py $work/_networkdirect.c >/dev/null
headers=$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')
compile() {
    module=$1
    shift
    $compiler -shared -static-libgcc -O2 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-int-to-pointer-cast \
        -include rig/windows/pyconfig.h -DPy_LIMITED_API=0x030a0000 -I"$headers" -Icdefs \
        "$@" $library -o "$work/$module"
    mv "$work/$module" "ndpy/$module"
}
compile _networkdirect.pyd $work/_networkdirect.c -lws2_32
compile _core.pyd cdefs/core/*.c
echo "$key" >$stamp
