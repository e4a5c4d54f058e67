#!/bin/bash
# The same line on each host, with the name of one that all reach:
#     HOST=host0 examples/cluster/torchrun.sh --folder=/shared/run1
# From 1 to 4 hosts train. After a crash, or when a host comes or goes, torchrun starts all ranks again.

# torch 2.13: otherwise a restart may look for ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# last_call_timeout: the seconds that a start with less than 4 hosts waits for one more.
exec torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=10 \
    --rdzv-id=run1 --rdzv-backend=c10d --rdzv-endpoint="${HOST:-localhost}:29500" \
    --rdzv-conf=last_call_timeout=30 \
    examples/cluster/train.py "$@"
