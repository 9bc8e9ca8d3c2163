#!/bin/sh
# Builds ndpy and softverbs with sanitizers, and runs Python with them, in their folder, so that it finds no other package:
#
#   rig/sanitized.sh asan ARGUMENTS                  AddressSanitizer and UndefinedBehaviorSanitizer, in .rig/asan
#   rig/sanitized.sh tsan ARGUMENTS                  ThreadSanitizer, in .rig/tsan
#   rig/sanitized.sh freethreaded-tsan ARGUMENTS     the same with the Python of freethreaded.sh, in .rig/freethreaded-tsan/package

set -u
cd "$(dirname "$0")/.." || exit 1
checkout=$PWD
kind=$1
shift
case $kind in
asan) sanitizers=address,undefined libraries='libasan.so libubsan.so' ;;
*tsan) sanitizers=thread libraries=libtsan.so ;;
esac
case $kind in
freethreaded-*) folder=$checkout/.rig/$kind/package python=$checkout/.rig/$kind/venv/bin/python ;;
*) folder=$checkout/.rig/$kind python=$checkout/.venv/bin/python ;;
esac

build() {
    flags=-fsanitize=$sanitizers
    make -s -C softrdma/verbs SANITIZE=$sanitizers || return 1
    # The modules are built again only after a change of their sources.
    key=$(find cdefs setup.py rig/sanitized.sh -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum)
    if [ "$key" != "$(cat "$folder/stamp" 2>/dev/null)" ]; then
        rm -rf "$folder"
        mkdir -p "$folder"
        # Python's own flags have -fwrapv, which hides signed overflows.
        CFLAGS="-g -O1 -fno-omit-frame-pointer -fno-wrapv $flags -fno-sanitize-recover=all" LDFLAGS=$flags \
            $python setup.py -q build_ext --force --build-lib "$folder" --build-temp "$folder/build" \
            >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; return 1; }
        echo "$key" >"$folder/stamp"
    fi
    find ndpy -name '*.py' -o -name '*.pyi' -o -name py.typed -o -name '*.sh' | tar -cf - -T - | tar -C "$folder" -xf -
    mkdir -p "$folder/ndpy/platforms/verbs/soft"
    cp softrdma/build/lib-"${kind##*-}"/* "$folder/ndpy/platforms/verbs/soft/"
}

build || exit 1

# A finding ends the process. Memory that has leaked is reported when it ends. The reports go to files, because pytest takes what its
# process writes. They are printed afterwards, and then the command has failed.
reports=$folder/report
rm -f "$reports".*
preload=
for library in $libraries; do preload="$preload $(gcc -print-file-name=$library)"; done
(
    cd "$folder" || exit 1
    # gcc 12's runtimes misread the thread-local memory of glibc 2.36.
    common=intercept_tls_get_addr=0:abort_on_error=1:log_path=$reports
    # exitcode=0: leaks alone do not end it, since most are Python's. Programs that have faults by the shim load it before the
    # runtime.
    export ASAN_OPTIONS=$common:detect_leaks=1:exitcode=0:strict_string_checks=1:verify_asan_link_order=0
    export UBSAN_OPTIONS=$common:print_stacktrace=1
    export TSAN_OPTIONS=$common:suppressions=$checkout/rig/tsan.supp:halt_on_error=1:second_deadlock_stack=1
    # A free-threaded Python has no other allocator than its own.
    case $kind in freethreaded-*) ;; *) export PYTHONMALLOC=malloc ;; esac
    export PYTHONPATH="$PWD" LD_PRELOAD="$preload"
    exec "$python" "$@"
)
status=$?
for report in "$reports".*; do
    [ -e "$report" ] || continue
    if grep -q 'detected memory leaks' "$report"; then
        # What Python, cffi and NumPy allocated is theirs. The third line names who called malloc().
        ours=$(awk -v RS= -F '\n' '/ leak of/ && $3 ~ /\.\.\/(engine|system|verbs)\/|cdefs\//' "$report")
    else
        ours=$(cat "$report")
    fi
    if [ -n "$ours" ]; then
        printf '%s:\n%s\n' "$report" "$ours"
        status=1
    fi
done
exit $status
