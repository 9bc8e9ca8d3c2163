#!/bin/sh
# Says how many lines of the engine its tests on Linux reach, for `make softrdma-coverage`: the contract, the interoperation tests and
# tests/soft on soft0, then the fuzzer's corpus. The report is in .rig/coverage.
#   BAR=90    the least, in percent; the exit status is 1 below
# ARGS goes to pytest.

set -u
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
folder=$PWD/.rig/coverage
build=$PWD/softrdma/build
rm -rf "$folder" "$build/linux-coverage" "$build/lib-coverage"
mkdir -p "$folder/package/ndpy/platforms/verbs/soft" "$folder/corpus"
[ -x "$folder/../gcovr/bin/gcovr" ] || {
    "$python" -m venv "$folder/../gcovr" && "$folder/../gcovr/bin/pip" -q install gcovr
} || exit 1

make -s -C softrdma/verbs COVERAGE=1 || exit 1
find ndpy -name '*.py' -o -name '*.pyi' -o -name py.typed -o -name '*.sh' -o -name '*.so' | tar -cf - -T - | tar -C "$folder/package" -xf -
cp "$build"/lib-coverage/* "$folder/package/ndpy/platforms/verbs/soft/"
checkout=$PWD
(
    cd "$folder/package" || exit 1
    export PYTHONPATH="$PWD" NDPY_SOFT_VARIANT=-coverage
    "$python" -m pytest -c "$checkout/pyproject.toml" "$checkout/tests/contract" "$checkout/tests/interop" "$checkout/tests/soft" \
        --adapter soft0 -q -p no:cacheprovider ${ARGS:-}
) || exit 1

# The same engine once more, driven by the fuzzer's inputs.
make -s -C softrdma/fuzz "BUILD=$folder/fuzz" replay-coverage || exit 1
tar xJf softrdma/fuzz/engine/corpus.tar.xz -C "$folder/corpus"
"$folder/fuzz/replay" "$folder/corpus" || exit 1

# The sources are named as from there.
cd softrdma/verbs || exit 1
"$folder/../gcovr/bin/gcovr" --root .. --object-directory "$PWD" --filter ../engine/ "$build/linux-coverage" "$folder/fuzz" \
    --merge-mode-functions=separate --fail-under-line "${BAR:-90}" --txt-metric line --txt "$folder/report.txt"
status=$?
cat "$folder/report.txt"
exit $status
