#!/bin/bash
# One run on a Slurm cluster: two replicas of two nodes with eight GPUs each.
#
#   sbatch examples/slurm.sh
#   sbatch examples/slurm.sh --config.total_steps=2000   # more flags of train
#
# Start it in the clone, where .venv is. Adapt the numbers of nodes and GPUs, and
# the mesh below: 2 x 4 x 4 = 32 devices. Run with Slurm 22.05 on CPUs, with one
# task on each node and a smaller mesh. GPUs and several machines were not tried.

#SBATCH --job-name=dilocox
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# SIGTERM comes ten minutes before the limit: the run saves and stops.
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append

. .venv/bin/activate
export DILOCOX_JAX_CACHE=${DILOCOX_JAX_CACHE-/shared/cache}
export NCCL_SOCKET_IFNAME=^lo,docker

# Tasks are numbered node by node, so that a replica lies on neighboring nodes.
# Each task ends with its own exit code.
srun --distribution=block --kill-on-bad-exit=0 \
  python -m experiments.train --distributed \
  --workdir=/shared/runs/dilocox \
  --config.sync.method=dilocox \
  --config.mesh.num_replicas=2 \
  --config.mesh.num_data_shards=4 \
  --config.mesh.num_stages=4 \
  --config.data.batch_size=64 \
  --config.inner.accumulate_steps=16 \
  "$@"
code=$?

# After these codes the same command continues the run: a process did not come
# (75), or a process was ended by a fault (134), by SIGKILL (137) or by SIGTERM
# (143). The bound keeps a job that can never start from starting for ever.
case $code in
  75 | 134 | 137 | 143)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit $code
