#!/bin/sh
# Cross-compiles ndpy/_networkdirect.pyd, the extension module for Windows on x64, with MinGW-w64. abi3: it is linked with
# the python3.dll of rig/wine.sh's Python and needs any CPython's headers; pyconfig.h here stands for Windows' own.

set -eu
cd "$(dirname "$0")/../.."
python=.venv/bin/python
work=build/windows
mkdir -p $work
$python cdefs/build_nd.py $work/_networkdirect.c >/dev/null
headers=$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')
x86_64-w64-mingw32-gcc -shared -O2 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-int-to-pointer-cast \
    -include rig/windows/pyconfig.h -DPy_LIMITED_API=0x030a0000 -I"$headers" -Icdefs \
    $work/_networkdirect.c .rig/wine/python/python3.dll -lws2_32 -o $work/_networkdirect.pyd
mv $work/_networkdirect.pyd ndpy/_networkdirect.pyd
