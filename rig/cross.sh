#!/bin/sh
# Cross-compiles _verbs.abi3.so, _core.abi3.so and softverbs' libraries for another Linux, from the source archive's contents in
# the working folder:
#
#   rig/cross.sh COMPILER STRIP FOLDER
#
# The modules use the limited API, so the headers of any CPython with integers of the same sizes do. Those of libibverbs and
# librdmacm, and of the kernel, are the same for all C libraries.

set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
compiler=$1 strip=$2 folder=$3
python=$root/.venv/bin/python
mkdir -p "$folder"

machine=$($compiler -dumpmachine)
headers=/usr/include
# musl's compiler looks only among musl's headers. The kernel's lie beside those of the machine's C library.
if [ -d "/usr/include/$machine/asm" ]; then headers="$headers /usr/include/$machine"; fi
after=
for each in $headers; do after="$after -idirafter $each"; done
limited_api=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')

"$python" cdefs/build_verbs.py "$folder/_verbs.c" >/dev/null
compile() {
    module=$1
    shift
    $compiler -shared -fPIC -std=gnu11 -O2 -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter \
        -DPy_LIMITED_API=0x030a0000 -I"$limited_api" -Icdefs $after "$@" -Wl,--no-as-needed -lc -o "$folder/$module"
}
compile _verbs.abi3.so "$folder/_verbs.c"
compile _core.abi3.so cdefs/core/*.c
rm "$folder/_verbs.c"
make -s -C softrdma/verbs CC="$compiler" BUILD="$folder/build" VERBS_HEADERS="$headers" WERROR=
cp "$folder"/build/lib/* "$folder"
rm -r "$folder/build"
for file in "$folder"/*; do $strip --strip-unneeded "$file"; done
