#!/bin/sh
# Cross-compiles ndpy/_networkdirect.pyd, the extension module for Windows on x64, with MinGW-w64, if anything that it is
# made from has changed. abi3: it is linked with the python3.dll of rig/wine.sh's Python and needs any CPython's headers;
# pyconfig.h here stands for Windows' own.

set -eu
cd "$(dirname "$0")/../.."
python=.venv/bin/python
compiler=x86_64-w64-mingw32-gcc
library=.rig/wine/python/python3.dll
module=ndpy/_networkdirect.pyd
work=build/windows
stamp=$work/stamp

# venv.sh's stamp stands for cffi and for Python's headers.
key=$({
    $compiler --version
    cat .venv/ndpy-stamp
    find cdefs rig/windows $library -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum
} | sha256sum)
if [ -e $module ] && [ "$key" = "$(cat $stamp 2>/dev/null)" ]; then exit; fi

echo "setup: $module" >&2
mkdir -p $work
$python cdefs/build_nd.py $work/_networkdirect.c >/dev/null
headers=$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')
$compiler -shared -static-libgcc -O2 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-int-to-pointer-cast \
    -include rig/windows/pyconfig.h -DPy_LIMITED_API=0x030a0000 -I"$headers" -Icdefs \
    $work/_networkdirect.c $library -lws2_32 -o $work/_networkdirect.pyd
mv $work/_networkdirect.pyd $module
echo "$key" >$stamp
