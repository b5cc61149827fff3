#!/bin/sh
#SBATCH --job-name=monarch
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --output="/scratch/my own/slurm-0123abcd/%j.log"
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --time=4:00:00
#SBATCH --nodelist=gpu[01-02]
#SBATCH --exclude=gpu03
#SBATCH --constraint=h100&nvlink
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --mem=800G
#SBATCH --reservation=spring
#SBATCH --comment="one two"

# Starts a host agent on every node, which connects to the notebook that submitted this job. The config of the
# agents holds secrets, so it is in the environment variable MONARCH_AGENT, and not in this file.

task='f=$1/$SLURM_JOB_ID-$SLURM_PROCID; shift
"$@" & agent=$!
trap "kill -TERM $agent" TERM
echo "$SLURMD_NODENAME $agent" >"$f.node"
wait $agent; code=$?
while kill -0 $agent 2>/dev/null; do wait $agent; code=$?; done
echo $code >"$f.end"
exit $code'

srun --no-kill --kill-on-bad-exit=0 --wait=0 \
  --mpi=none --cpu-bind=none --cpus-per-task=64 \
  --output='/scratch/my own/slurm-0123abcd/%j-%t.log' \
  sh -c "$task" task '/scratch/my own/slurm-0123abcd' /opt/venv/bin/python -c 'import sys; sys.path = [path for path in sys.path if path]; from monarch_kernel.bootstrap import main; main()' agent
