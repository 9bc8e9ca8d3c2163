# The virtual environment .venv with the package installed for editing. Read by setup.sh.

# All that the installation depends on: a change of any of it makes a new one.
venv_key() {
    {
        "${PYTHON:-python3}" --version
        find pyproject.toml setup.py cdefs rig/venv.sh -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum
    } | sha256sum
}

make_venv() {
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "ndpy needs Python 3.10 or later; $python is $("$python" --version)"
    key=$(venv_key)
    stamp=.venv/ndpy-stamp
    if [ "$key" = "$(cat $stamp 2>/dev/null)" ]; then
        # softrdma/verbs/Makefile knows what has changed.
        .venv/bin/python setup.py -q build_softverbs --inplace
        return
    fi
    say "virtual environment .venv"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    pip='.venv/bin/python -m pip --disable-pip-version-check --quiet'
    # The build tools go in first and stay: building without isolation is quicker, and needs the
    # network only once.
    $pip install 'setuptools>=77' 'cffi>=1.17'
    $pip install --no-build-isolation --config-settings editable_mode=compat --editable '.[test,lint,wheels]'
    echo "$key" >$stamp
}
