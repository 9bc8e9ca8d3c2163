# apt with lists of its own for a suite of Debian, so that nothing of this machine is changed. Read by other scripts. $state is the
# folder that it works in, $architecture that of the packages (amd64). It calls die().
#
#   read_suite testing              reads the lists of a suite
#   with_apt testing apt-get ...    runs apt-get or apt-cache with them

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# An empty list of installed packages keeps apt from this machine's.
with_apt() {
    lists=$state/apt-$1
    program=$2
    shift 2
    "$program" -q -o Dir::State="$lists/state" -o Dir::State::status="$lists/status" -o Dir::Cache="$lists/cache" \
        -o Dir::Etc::sourcelist="$lists/sources.list" -o Dir::Etc::sourceparts="$lists/none" \
        -o Dir::Etc::preferences="$lists/none" -o Dir::Etc::preferencesparts="$lists/none" \
        -o Acquire::Languages=none -o APT::Architecture="${architecture:-amd64}" \
        -o APT::Architectures="${architecture:-amd64}" -o APT::Sandbox::User=root "$@"
}

read_suite() {
    lists=$state/apt-$1
    command -v apt-get >/dev/null || die "what Debian has is fetched with apt-get, which this machine does not have"
    [ -e $keyring ] || die "Debian's keys are missing; install the package debian-archive-keyring"
    # The mirror that this machine uses, or another one.
    mirror=${DEBIAN_MIRROR:-}
    [ -n "$mirror" ] || mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep '/debian/*$' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no mirror of Debian here; set DEBIAN_MIRROR to the address of one"
    mkdir -p "$lists/state/lists/partial" "$lists/cache/archives/partial" "$lists/none"
    : >"$lists/status"
    for kind in deb ${2:-}; do echo "$kind [signed-by=$keyring] $mirror $1 main"; done >"$lists/sources.list"
    # The newest kernel of stable is in the archive of security updates.
    if [ "$1" = stable ]; then
        echo "deb [signed-by=$keyring] ${mirror%/}-security stable-security main" >>"$lists/sources.list"
    fi
    with_apt "$1" apt-get update >"$lists/log" 2>&1 || { tail -n 5 "$lists/log" >&2; die "the lists of $1 could not be read"; }
}
