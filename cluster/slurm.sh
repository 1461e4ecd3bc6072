#!/usr/bin/env bash
# One run over the GPUs of several nodes: sbatch cluster/slurm.sh
# Every node starts one process for each of its GPUs; they find each other by SLURM's variables. A
# process takes the GPU of its number on the node, and so must see them all: not --gpus-per-task.
# For other numbers of GPUs: BATCH is a multiple of all of them, EXPERT a divisor.
#SBATCH --job-name=moe_jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
# Ten minutes before the time is up, SIGTERM: the run saves and ends with 143. sbatch again goes on;
# SLURM does that by itself only where a node failed or the job had to make room (--requeue).
#SBATCH --signal=TERM@600
#SBATCH --requeue
set -euo pipefail

srun python -m moe_jax.train --distributed \
  --config "${CONFIG:-configs/demo.py:moe}" --workdir "${WORKDIR:-runs/slurm}" \
  --config.mesh.expert="${EXPERT:-8}" --config.data.batch_size="${BATCH:-32}"
