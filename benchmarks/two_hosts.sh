#!/usr/bin/env bash
# overlap-bench on two hosts that are none: one rank in each of two network namespaces, joined by a link of a set rate.
#
#   sudo RATE=200mbit benchmarks/two_hosts.sh fused_sparse_dist semi_sync        arms, as overlap-bench names them
#   sudo RATE=unlimited benchmarks/two_hosts.sh '*' -- rounds=5                  and overrides of its config
#
# RATE    as tc writes rates (50mbit, 1gbit), or unlimited; default 300mbit. Of the link, in each direction.
# PYTHON  the interpreter that has the package; default python.
# SCRIPT  a script to run in the place of overlap-bench, with the words after -- (no arms then).
#
# Needs root, iproute2 and Linux's tbf qdisc. All that it makes is gone when it ends, however it ends.

set -euo pipefail

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
fail() { echo "error: $1" >&2; exit 2; }

RATE=${RATE:-300mbit}
PYTHON=${PYTHON:-python}
# What the link carries for nothing after a pause: a millisecond's worth, but no less than the largest packet that the kernel
# hands on whole (64 KiB). Cut up by tbf, packets would take a core.
BURSTS_PER_S=1000
LEAST_BURST=70000
QUEUE_MS=400     # like a host of its own, which keeps what the link cannot take yet and drops nothing

arms=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        -*) fail "unknown option '$1'; see $0 --help" ;;
    esac
    arms+=("$1")
    shift
done
[ $# -eq 0 ] || shift
command=("${SCRIPT:-}")
[ -n "${SCRIPT:-}" ] || [ ${#arms[@]} -gt 0 ] || { usage >&2; fail "which modes? For example: $0 fused_sparse_dist semi_sync"; }
if [ "$RATE" != unlimited ]; then
    [[ $RATE =~ ^([0-9]+)([kmg])bit$ ]] || fail "RATE is like 50mbit or 1gbit, or unlimited, got '$RATE'"
    declare -A zeros=([k]=000 [m]=000000 [g]=000000000)
    bits=${BASH_REMATCH[1]}${zeros[${BASH_REMATCH[2]}]}
    burst=$((bits / 8 / BURSTS_PER_S))
    burst=$((burst > LEAST_BURST ? burst : LEAST_BURST))
fi
[ "$(id -u)" -eq 0 ] || fail "network namespaces need root: sudo $0 ${arms[*]}"
for tool in ip tc; do
    command -v "$tool" >/dev/null || fail "'$tool' is missing: install iproute2"
done
"$PYTHON" -c 'import lightning_overlap' 2>/dev/null || fail "'$PYTHON' cannot import lightning_overlap; set PYTHON"

tag=ovl$$
hosts=("${tag}a" "${tag}b")
addresses=(10.213.77.1 10.213.77.2)
pids=()

cleanup() {
    trap - EXIT INT TERM HUP
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done  # its end of the link goes with it
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add "${hosts[0]}" netns "${hosts[0]}" type veth peer name "${hosts[1]}" netns "${hosts[1]}"
for i in 0 1; do
    in_host=(ip netns exec "${hosts[i]}")
    "${in_host[@]}" ip address add "${addresses[i]}/24" dev "${hosts[i]}"
    "${in_host[@]}" ip link set "${hosts[i]}" up
    "${in_host[@]}" ip link set lo up
    if [ "$RATE" != unlimited ]; then
        "${in_host[@]}" tc qdisc add dev "${hosts[i]}" root tbf rate "$RATE" burst "$burst" latency "${QUEUE_MS}ms" ||
            fail "tc has no tbf qdisc here (the kernel's sch_tbf)"
    fi
done

names=$(IFS=,; echo "${arms[*]}")
[ -n "${SCRIPT:-}" ] || command=(-m lightning_overlap.benchmark bench=two_hosts "arms=[$names]")
for i in 0 1; do
    # As torchrun on two nodes of one rank each would.
    ip netns exec "${hosts[i]}" env \
        RANK=$i GROUP_RANK=$i LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 GROUP_WORLD_SIZE=2 \
        MASTER_ADDR="${addresses[0]}" MASTER_PORT=29500 TORCHELASTIC_RUN_ID="$tag" \
        GLOO_SOCKET_IFNAME="${hosts[i]}" TP_SOCKET_IFNAME="${hosts[i]}" OMP_NUM_THREADS=1 \
        "$PYTHON" "${command[@]}" "$@" &
    pids+=($!)
done
echo "${SCRIPT:-overlap-bench} on two hosts, link $RATE in each direction"
wait -n || exit $?    # one that fails leaves the other one waiting
wait "${pids[@]}"
