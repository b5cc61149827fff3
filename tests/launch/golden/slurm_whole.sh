#!/bin/sh
#SBATCH --job-name=monarch
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --output=/home/me/.monarch/slurm-0123abcd/%j.log
#SBATCH --mem=0
#SBATCH --exclusive

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
  --mpi=none --cpu-bind=none \
  --output=/home/me/.monarch/slurm-0123abcd/%j-%t.log \
  sh -c "$task" task /home/me/.monarch/slurm-0123abcd /opt/venv/bin/python -c 'import sys; sys.path = [path for path in sys.path if path]; from monarch_kernel.bootstrap import main; main()' agent
