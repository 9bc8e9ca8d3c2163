# ndpy and softverbs built with sanitizers. Read by test-softverbs.sh and test-freethreaded.sh; $checkout is this one, and $python
# its environment's.
#
#   build_sanitized asan    the package with modules and libraries of its own, in .rig/asan; tsan: in .rig/tsan
#                           freethreaded-tsan: as tsan, for the Python of freethreaded.sh, in .rig/freethreaded-tsan/package
#   sanitized asan ...      runs a command with them, in that folder, so that Python finds no other package

# UndefinedBehaviorSanitizer runs with AddressSanitizer.
sanitizers_of() {
    case $1 in
    asan) echo address,undefined ;;
    *tsan) echo thread ;;
    esac
}

sanitized_folder() {
    case $1 in
    freethreaded-*) echo "$checkout/.rig/$1/package" ;;
    *) echo "$checkout/.rig/$1" ;;
    esac
}

build_sanitized() {
    kind=$1 folder=$(sanitized_folder "$1") flags=-fsanitize=$(sanitizers_of "$1")
    make -s -C softrdma/verbs SANITIZE="$(sanitizers_of "$kind")" || return 1
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

# A finding ends the process. Memory that has leaked is reported when it ends. The reports go to files, because pytest takes what its
# process writes. They are printed afterwards, and then the command has failed.
sanitized() {
    kind=$1
    shift
    case $kind in
    asan) preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" ;;
    *tsan) preload=$(gcc -print-file-name=libtsan.so) ;;
    esac
    reports=$(sanitized_folder "$kind")/report
    rm -f "$reports".*
    (
        cd "$(sanitized_folder "$kind")" || exit 1
        # gcc 12's runtimes misread the thread-local memory of glibc 2.36.
        common=intercept_tls_get_addr=0:abort_on_error=1:log_path=$reports
        # exitcode=0: leaks alone do not end it, since most are Python's.
        ASAN_OPTIONS=$common:detect_leaks=1:exitcode=0:strict_string_checks=1
        UBSAN_OPTIONS=$common:print_stacktrace=1
        TSAN_OPTIONS=$common:suppressions=$checkout/rig/tsan.supp:halt_on_error=1:second_deadlock_stack=1
        export ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS
        # A free-threaded Python has no other allocator than its own.
        case $kind in freethreaded-*) ;; *) export PYTHONMALLOC=malloc ;; esac
        export PYTHONPATH="$PWD" LD_PRELOAD="$preload"
        exec "$@"
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
    return $status
}
