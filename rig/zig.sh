#!/bin/sh
# Provides a compiler for Linux on aarch64 with musl, which Debian does not have: .rig/zig/aarch64-linux-musl-gcc. It is that
# of Zig, from PyPI's ziglang. A second run takes no time.

set -eu
cd "$(dirname "$0")/.."
folder=$PWD/.rig/zig
compiler=$folder/aarch64-linux-musl-gcc
if [ -x "$compiler" ]; then exit 0; fi
rm -rf "$folder"
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'ziglang>=0.13'
# Its cache belongs to this folder too.
cat >"$compiler.new" <<END
#!/bin/sh
ZIG_GLOBAL_CACHE_DIR=$folder/cache ZIG_LOCAL_CACHE_DIR=$folder/cache exec "$folder/venv/bin/python" -m ziglang cc -target aarch64-linux-musl -Wno-unused-command-line-argument "\$@"
END
chmod +x "$compiler.new"
mv "$compiler.new" "$compiler"
