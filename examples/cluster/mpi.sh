#!/bin/bash
# On one host, for all: HOSTS=host0:8,host1:8 examples/cluster/mpi.sh --folder=/shared/run1
# Open MPI starts a process for each rank, and ends all if one fails. Then this starts them again, ten times at most.
# SIGTERM or Ctrl-C ends it.

: "${HOSTS:?name the hosts and their ranks, as HOSTS=host0:8,host1:8}"
export MASTER_ADDR="${HOSTS%%[:,]*}" MASTER_PORT=29500
trap 'kill -TERM $job; wait $job; exit 143' TERM INT
for _ in {0..10}; do
    mpirun --host "$HOSTS" --map-by ppr:8:node -x MASTER_ADDR -x MASTER_PORT -x PATH bash -c '
        export WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
        export NODE_RANK=$((OMPI_COMM_WORLD_RANK / LOCAL_WORLD_SIZE)) LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
        exec python examples/cluster/train.py "$@"' rank "$@" &
    job=$!
    wait $job && exit
done
exit 1
