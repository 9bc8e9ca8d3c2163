#!/bin/sh
# Runs as root inside the VM: creates the software adapters, runs the command, and reports its outcome to the host.
#
# The host listens on the virtio ports out, err, log and control. A write to a virtio port returns before the host has
# received it. So every stream ends with a mark that the host knows (MARK), and the kernel log has a record with this run's name
# (RUN). The host ends the VM when it has all of them.

job=$1
. "$job/settings"        # MARK, RUN, ADAPTERS, MERGED, CHECKOUT, NETWORK, WIRES
ports=/dev/virtio-ports
run=/run/ndpy

exec 3<>"$ports/ndpy.control"
tell() { printf '%s\n' "$*" >&3; }
fail() { tell "failed $*"; sleep 3600; }

# The host says when the command may begin. If its end disappears, the VM powers off.
mkdir -p $run
mkfifo $run/go
(
    while read -r word <&3; do [ "$word" != go ] || echo >$run/go; done
    echo o >/proc/sysrq-trigger
) &

# After a lost record the log is read again from its start. That is harmless, because each record has a number.
(while :; do cat /dev/kmsg 2>/dev/null; sleep 0.2; done >"$ports/ndpy.log") &

options=trans=virtio,version=9p2000.L,msize=512000,access=any
if [ "$CHECKOUT" != / ]; then
    mkdir -p "$CHECKOUT" # folders such as /var/tmp are empty in the VM
    mount -t 9p -o "rw,$options" ndpy.checkout "$CHECKOUT" || fail "$CHECKOUT could not be mounted"
fi

# The root is mounted without a cache. Folders that do not change meanwhile are mounted over it from a second mount that
# has a cache.
mkdir -p $run/host
if mount -t 9p -o "ro,$options,cache=loose" ndpy.host $run/host; then
    while read -r folder; do
        mkdir -p "$folder" && mount --bind "$run/host$folder" "$folder"
    done <"$job/cached"
fi

# One process, because each one reads the lists of all modules.
modules="ib_core ib_uverbs rdma_cm rdma_ucm iw_cm veth"
case " $ADAPTERS " in *" rxe "*) modules="$modules rdma_rxe" ;; esac
if [ -n "$WIRES$NETWORK" ]; then modules="$modules virtio_net"; fi
modprobe -a $modules || fail "modprobe -a $modules (are they in /lib/modules/$(uname -r)?)"
ip link set lo up

# on_veth NAME TYPE NETDEV IPV4 IPV6: creates an adapter on a veth pair of its own, so that librdmacm finds exactly one
# adapter for each address.
on_veth() {
    ip link add "$3" mtu 4200 type veth peer name "$3p" mtu 4200 &&
        ip address add "$4/24" dev "$3" &&
        ip address add "$5/64" dev "$3" nodad &&
        ip link set "$3" up && ip link set "$3p" up &&
        rdma link add "$1" type "$2" netdev "$3"
}

# on_wire NAME TYPE: creates an adapter on the first card.
on_wire() { rdma link add "$1" type "$2" netdev wire0; }

# Each card is found by its MAC address.
wires=0
for wire in $WIRES; do
    mac=${wire%%/*}
    addresses=${wire#*/}
    device=$(grep -l -i -x "$mac" /sys/class/net/*/address) && netdev=$(basename "${device%/address}") || fail "no card has the address $mac"
    # The limits that the host gave the card are in effect already.
    mtu=$(ip -d link show dev "$netdev" | sed -n 's/.* maxmtu \([0-9]*\).*/\1/p')
    [ "$mtu" -le 9000 ] || mtu=1500
    ip link set dev "$netdev" down && ip link set dev "$netdev" name wire$wires &&
        ip address add "${addresses%/*}/24" dev wire$wires && ip address add "${addresses#*/}/64" dev wire$wires nodad &&
        ip link set wire$wires mtu "$mtu" up || fail "the network wire$wires could not be set up"
    wires=$((wires + 1))
done

for adapter in $ADAPTERS; do
    case $adapter in
    rxe)
        if [ -n "$WIRES" ]; then on_wire rxe0 rxe; else on_veth rxe0 rxe veth0 192.0.2.1 2001:db8::1; fi ||
            fail "rxe0 could not be created"
        ;;
    siw)
        if modprobe siw 2>/dev/null; then
            if [ -n "$WIRES" ]; then on_wire siw0 siw; else on_veth siw0 siw veth1 198.51.100.1 2001:db8:1::1; fi ||
                fail "siw0 could not be created"
        elif [ "$ADAPTERS" = siw ]; then
            fail "this kernel has no siw module"
        fi
        ;;
    esac
done

# QEMU's user network. It has no default route, so only the host's loopback interface, 10.0.2.2, can be reached.
if [ -n "$NETWORK" ]; then
    for device in /sys/class/net/*; do
        if [ -e "$device/device" ]; then netdev=${device##*/}; fi
    done
    ip address add 10.0.2.15/24 dev "$netdev" && ip link set "$netdev" up || fail "the network could not be set up"
    case " $ADAPTERS " in
    *" siw "*) [ ! -e /sys/module/siw ] || rdma link add siw1 type siw netdev "$netdev" || fail "siw1 could not be created" ;;
    esac
fi

echo 16 >/proc/sys/vm/nr_hugepages # for programs that register huge pages
ulimit -l unlimited
ulimit -n "$(ulimit -H -n)"
mkfifo $run/out $run/err
cat $run/out >"$ports/ndpy.out" &
out=$!
if [ -z "$MERGED" ]; then cat $run/err >"$ports/ndpy.err" & err=$!; else err=; fi

# 128: this kernel had an oops. The host sees it on the console, ends this VM and boots another one. So the command must
# not begin here.
[ $(($(cat /proc/sys/kernel/tainted) & 128)) = 0 ] || sleep 3600

tell ready
read -r _ <$run/go

# A line that is written to this file asks the host to cut the power of the other VM.
if [ -n "$WIRES" ]; then
    mkfifo $run/kill
    (while read -r _ <$run/kill; do tell kill; done) &
fi

echo "<6>ndpy: begin $RUN" >/dev/kmsg
tell "begin $(cat /proc/uptime)"
if [ -n "$MERGED" ]; then
    sh "$job/command" </dev/null >$run/out 2>&1 3>&-
else
    sh "$job/command" </dev/null >$run/out 2>$run/err 3>&-
fi
tell "status $?"

# A process that the command started may outlive it and hold the pipes open.
(sleep 5; kill $out $err) 2>/dev/null &
wait $out $err 2>/dev/null
printf '%s' "$MARK" >"$ports/ndpy.out"
if [ -z "$MERGED" ]; then printf '%s' "$MARK" >"$ports/ndpy.err"; fi
timeout 10 sync -f "$CHECKOUT"
echo "<6>ndpy: end $RUN" >/dev/kmsg
sleep 3600
