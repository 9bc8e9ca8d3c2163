# The virtual environment .venv with the package installed for editing. Read by setup.sh.

# Which Python this is. An environment and the Python that it was made of are the same one. After a distribution's upgrade, what was
# installed for the old one is not found any more.
identity_of() {
    "$1" -c 'import sys; print(sys.version, sys.base_prefix, sys.implementation.cache_tag, getattr(sys, "abiflags", ""))'
}

# All that the installation depends on: a change of any of it makes a new one.
venv_key() {
    {
        echo "$identity"
        find pyproject.toml setup.py cdefs rig/venv.sh -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum
    } | sha256sum
}

make_venv() {
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "ndpy needs Python 3.10 or later; $python is $("$python" --version)"
    identity=$(identity_of "$python")
    key=$(venv_key)
    stamp=.venv/ndpy-stamp
    if [ "$key" = "$(cat $stamp 2>/dev/null)" ] && [ "$identity" = "$(identity_of .venv/bin/python 2>/dev/null)" ]; then
        # softrdma/verbs/Makefile knows what has changed.
        .venv/bin/python setup.py -q build_softverbs --inplace
        return
    fi
    say "virtual environment .venv"
    if [ "$identity" != "$(cat .venv/ndpy-python 2>/dev/null)" ] || [ ! -x .venv/bin/python ]; then
        # $python may be that of the environment itself, which goes.
        base=$("$python" -c 'import sys; print(sys._base_executable)')
        rm -rf .venv
        "$base" -m venv .venv
        echo "$identity" >.venv/ndpy-python
    fi
    pip='.venv/bin/python -m pip --disable-pip-version-check --quiet'
    # The build tools go in first and stay: building without isolation is quicker, and needs the
    # network only once.
    $pip install 'setuptools>=77' 'cffi>=1.17'
    $pip install --no-build-isolation --config-settings editable_mode=compat --editable '.[test,lint,docs,wheels]'
    echo "$key" >$stamp
}
