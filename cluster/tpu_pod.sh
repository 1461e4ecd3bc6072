#!/usr/bin/env bash
# One run over all hosts of a TPU pod slice: TPU=name ZONE=zone BUCKET=path cluster/tpu_pod.sh
# The same command runs on every host, each with the repository in ~/moe_jax, installed; they find
# each other by the slice's metadata. The workdir is a folder that all hosts see, such as a mounted
# bucket or a file server. BATCH is a multiple of the number of chips, EXPERT a divisor.
set -euo pipefail

gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "
  cd moe_jax && python3 -m moe_jax.train --distributed \
    --config '${CONFIG:-configs/demo.py:moe}' --workdir '${BUCKET}/runs/pod' \
    --config.mesh.expert='${EXPERT:-8}' --config.data.batch_size='${BATCH:-32}'"
