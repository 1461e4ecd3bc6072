#!/usr/bin/env bash
# One run over the GPUs of several nodes: sbatch cluster/slurm.sh
# Every node starts one process for each of its GPUs; they find each other by SLURM's variables.
#SBATCH --job-name=moe_jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
# Ten minutes before the time is up, SIGTERM: the run saves, and a requeued job goes on.
#SBATCH --signal=TERM@600
#SBATCH --requeue
set -euo pipefail

srun python -m moe_jax.train --distributed \
  --config "${CONFIG:-configs/demo.py:moe}" --workdir "${WORKDIR:-runs/slurm}" \
  --config.mesh.expert="${EXPERT:-8}"
