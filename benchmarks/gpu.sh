#!/usr/bin/env bash
# The tables of RESULTS "On one GPU", measured in one call of less than nine minutes on a machine with one GPU.
#
#   benchmarks/gpu.sh [FOLDER]                 writes everything under FOLDER (or $OUT, or ./gpu_out)
#   benchmarks/gpu.sh --device cpu [FOLDER]    the same parts, small, on CPU ranks: whether the script itself runs
#   benchmarks/gpu.sh --print                  only prints the Python commands that it would run, one a line
#
# PYTHON  the interpreter that has the package; default python3.
# PARTS   which parts to run; default all: host device queued two_ranks timeline.
#
# Each part has a limit of its own and a log; a part that fails or is late stops no other. The last lines say what each
# part's exit code was and how long it took. Exit code: 0 if all parts have ended well, 1 if not, 2 for wrong arguments.

set -uo pipefail

device=cuda printing=
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=${2:-}; shift 2 || shift ;;
        --print) printing=yes; shift ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "error: unknown option '$1'; see $0 --help" >&2; exit 2 ;;
        *) break ;;
    esac
done
case $device in cuda | cpu) ;; *) echo "error: --device is cuda or cpu, got '$device'" >&2; exit 2 ;; esac
out=${1:-${OUT:-$PWD/gpu_out}}
PYTHON=${PYTHON:-python3}
if [ "$printing" ]; then
    PYTHON=show  # a function below, in the place of the interpreter
else
    mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
fi
PARTS=${PARTS:-host device queued two_ranks timeline}
MOST_S=520  # all parts together
export PYTHONUNBUFFERED=1 PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"

streams() { echo "$1,$1/current,$1/dedicated"; }
EXACT="base,sparse_dist,$(streams fused_sparse_dist),fused_sparse_dist_after_optimizer,$(streams split_backward)"
THEIRS="torchrec/sparse_dist,torchrec/fused_sparse_dist"
host=(rounds=3 steps=40 data.batch_size=8192 num_batches=4 "arms=[$EXACT,$THEIRS]")
dense=("+model.bottom_layers=[512,128]" "+model.top_layers=[4096,4096,2048]" +model.embedding_dim=128)
bound=(rounds=2 steps=15 data.batch_size=16384 num_batches=4 measured_steps=0 "${dense[@]}" "arms=[$EXACT,$THEIRS]")
queued=(rounds=1 steps=15 data.batch_size=16384 num_batches=4 measured_steps=0 "${dense[@]}"
    "arms=[fused_sparse_dist,fused_sparse_dist/dedicated]")
# Between the ranks an all-to-all crosses sockets. TWO_BATCH moves its share of a step, which should be a third of base's.
two=(rounds=3 steps=15 "data.batch_size=${TWO_BATCH:-4096}" num_batches=4 +model.embedding_dim=128
    "+model.bottom_layers=[512,128]" "+model.top_layers=[2048,1024]"
    "arms=[base,fused_sparse_dist,fused_sparse_dist/dedicated,split_backward,torchrec/sparse_dist]")
timeline=(data.batch_size=16384 "${dense[@]}" data.num_batches=16 data.num_val_batches=1 data.num_test_batches=1)
if [ "$device" = cpu ]; then
    MOST_S=1800
    small=(rounds=1 steps=2 warm_up=2 measured_steps=1 num_batches=2 data.batch_size=16 data.num_tables=2
        data.rows_per_table=50 +model.embedding_dim=8 "+model.bottom_layers=[16,8]" "+model.top_layers=[16]")
    host=("${small[@]}" "arms=[split_backward/dedicated,torchrec/sparse_dist]")
    bound=("${small[@]}" "arms=[fused_sparse_dist]")
    queued=("${bound[@]}")
    two=("${small[@]}" "arms=[fused_sparse_dist,torchrec/sparse_dist]")
    timeline=("${small[@]:5}" data.num_batches=16 data.num_val_batches=1 data.num_test_batches=1)
fi

failed=0
part() {  # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    [[ " $PARTS " == *" ${name%%.*} "* ]] || return 0
    if [ "$printing" ]; then
        "$@" || failed=1
        return
    fi
    [ "$device" = cuda ] || limit=$((limit * 4))  # other work may have the CPUs
    limit=$((limit < MOST_S - SECONDS ? limit : MOST_S - SECONDS))
    echo "--- $name"
    if [ "$limit" -lt 5 ]; then code=124; else
        timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
        code=$?
    fi
    [ $code -eq 0 ] || failed=1
    grep -v -e Warning -e '^ *$' -e '^\[rank' "$out/$name.log" 2>/dev/null | tail -n 45 | cut -c1-200
    echo "$name: exit code $code, $((SECONDS - start)) s" >>"$out/summary.txt"
}
bench() {  # NAME LIMIT_S OVERRIDES...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" -m lightning_overlap.benchmark trainer="$device" trainer.devices=1 \
        hydra.run.dir="$out/$name" "$@"
}
show() {  # ARGUMENTS...: print the call of the interpreter
    printf '%s\n' "python$(printf ' %q' "$@")"
}
two_ranks() {  # OVERRIDES...: as torchrun on two nodes of one rank each; NCCL takes ranks that share a GPU for two hosts
    local rank pid ended pids=() code=0
    for rank in 0 1; do
        RANK=$rank GROUP_RANK=$rank LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 GROUP_WORLD_SIZE=2 \
            MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29517}" TORCHELASTIC_RUN_ID="gpu_sh_$$" \
            NCCL_HOSTID="rank$rank" NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo \
            "$PYTHON" -m lightning_overlap.benchmark trainer="$device" trainer.devices=1 +trainer.num_nodes=2 "$@" &
        pids+=($!)
    done
    wait -n || kill "${pids[@]}" 2>/dev/null  # one that fails leaves the other one waiting; both may have ended
    for pid in "${pids[@]}"; do
        wait "$pid"
        ended=$?
        [ $code -ne 0 ] || code=$ended
    done
    return $code
}
draw() {  # MODE OVERRIDES...: a trace of steps, read by overlap-timeline; on a CPU the callback draws the picture itself
    local mode=$1 folder="$out/timeline_$1" traces
    shift
    "$PYTHON" -m lightning_overlap.train trainer="$device" trainer.devices=1 pipeline="$mode" callbacks=timeline \
        callbacks.timeline.dirpath="$folder" hydra.run.dir="$folder/run" "$@" || return
    [ -z "$printing" ] || return 0
    traces=$(find "$folder" -name '*.json.gz' | sort)
    if [ -n "$traces" ]; then
        # shellcheck disable=SC2086
        "$PYTHON" -c 'import sys; from lightning_overlap.profiling.command import main; sys.exit(main())' $traces \
            --steps 2 --out "$folder/trace.png" || return
    fi
    find "$folder" -name '*.png' | grep . # a picture is there
}
export -f show two_ranks draw
export PYTHON device out printing

[ "$printing" ] || rm -f "$out/summary.txt"
[ "$device" = cpu ] || [ "$printing" ] || nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
bench host 130 "${host[@]}"
bench device 140 "${bound[@]}"
for most in 2 3 null; do bench "queued.$most" 40 "${queued[@]}" +strategy.max_queued_steps=$most; done
part two_ranks 110 bash -c 'two_ranks "$@"' two_ranks hydra.run.dir="$out/two_ranks" "${two[@]}"
for mode in fused_sparse_dist split_backward; do
    part "timeline.$mode" 40 bash -c 'draw "$@"' draw "$mode" "${timeline[@]}"
done
[ -z "$printing" ] || exit $failed
echo "--- summary"
cat "$out/summary.txt"
exit $failed
