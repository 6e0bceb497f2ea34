#!/bin/bash
# sbatch --nodes 2 recipes/slurm.sh --config recipes/small.yaml data=/shared/text out=/shared/runs/mine
# PROCESSES a node; the folder of the run is one that all nodes see. A job that is requeued goes on by itself.
#SBATCH --job-name=headway
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((${SLURM_CPUS_ON_NODE:-1} / ${PROCESSES:-1}))
srun python -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${PROCESSES:-1}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:${PORT:-29500}" \
    -m headway train --resume auto "$@"
