# What each node runs: an agent. And what must also work when the first node, and srun on it, is dead.

# Before the time limit: queue this job again. Slurm then ends the agents with SIGTERM.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
# Slurm ends the agent too; wait until it has left.
trap leaving=yes TERM

# A quorum needs two of its three members.
case $RDZV_ENDPOINT in *://*) backend=redis least=1 ;; *) backend=quorum least=2 ;; esac

# The signal of the time limit would end the agent and its workers: they ignore it.
(trap '' USR1; trap - TERM; exec rdzv run \
    --rdzv-backend=$backend \
    --rdzv-endpoint="$RDZV_ENDPOINT" \
    --rdzv-id="slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-conf=last_call_timeout=1 \
    --nnodes="$least:$SLURM_JOB_NUM_NODES" \
    --nproc-per-node=1 \
    train.py "train-$SLURM_JOB_ID.pt") &
agent=$!

# A trap ends the wait, not the agent.
while true; do
    wait "$agent"
    status=$?
    kill -0 "$agent" 2>/dev/null || break
done

# The job ends with the batch script, on the first node. If srun does not answer, that is gone too.
if [ -z "${leaving-}" ] && ! timeout 10 bash -c ": < /dev/tcp/$SLURM_LAUNCH_NODE_IPADDR/$SLURM_SRUN_COMM_PORT"; then
    if [ "$status" -eq 0 ]; then
        echo "srun is gone: ending the job, which has succeeded"
        scancel "$SLURM_JOB_ID"
    else
        echo "srun is gone: queueing the job again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$status"
