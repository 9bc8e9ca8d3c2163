# The distribution's pyverbs and PyPI's ibverbs, in .rig/bench: `make bench` compares ndpy with them, and tests/interop has them as
# the other end. Read by setup.sh.
# The environment is the system's Python, because pyverbs is built for that one only. It has what ndpy needs, but not ndpy.

bench_python=/usr/bin/python3

bench_key() {
    {
        "$bench_python" --version
        cat "$rig/bench.sh"
        package_version python3-pyverbs
    } | sha256sum
}

provide_bench() {
    if ! installed python3-pyverbs; then
        say "installing python3-pyverbs"
        install_now python3-pyverbs || die "python3-pyverbs could not be installed"
    fi
    bench=$state/bench
    key=$(bench_key)
    if [ "$key" = "$(cat "$bench/stamp" 2>/dev/null)" ]; then return; fi
    say "Python environment for the benchmark, in .rig/bench"
    rm -rf "$bench"
    "$bench_python" -m venv --system-site-packages "$bench/venv"
    # Without these options pip takes a cffi or psutil of the system, whatever its version is.
    "$bench/venv/bin/python" -m pip --disable-pip-version-check --quiet install --ignore-installed \
        'cffi>=1.17' 'psutil>=5.9' ibverbs || die "the Python packages could not be installed"
    echo "$key" >"$bench/stamp"
}
