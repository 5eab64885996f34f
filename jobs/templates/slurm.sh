#!/bin/bash
# @{made_by}
# Submit with sbatch. Keep it, and change what you like: nothing but what stands here happens.
#SBATCH --job-name=@{name}
#SBATCH --account=@{account}
#SBATCH --partition=@{partition}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=@{tasks_per_node}
#SBATCH --cpus-per-task=@{cpus_per_task}
#SBATCH --gpus-per-node=@{gpus_per_node}
#SBATCH --time=@{time}
#SBATCH --array=@{array}
#SBATCH --output=@{output}
# After a requeue the output goes on in the same file.
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 to this shell alone (B:), so many seconds before the end: time to save.
#SBATCH --signal=B:USR1@@{signal}
#SBATCH @{directives}

# To this file's folder, from wherever it was submitted: what runs is a copy of it.
folder=$(scontrol show job "$SLURM_JOB_ID" | sed -n '/^ *Command=\//{s|^[^/]*\(/.*\)/[^/]*$|\1|p;q}')
cd "${folder:-.}" || exit 1
# After `sbatch --export=NONE` srun would hand on nothing of what is exported below.
unset SLURM_EXPORT_ENV

# How often the job may put itself back into the queue.
max_restarts=@{max_restarts}

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}

@{exports}

# USR1 goes on to the launcher, and from there to all ranks: training saves, and ends with code 75.
# TERM means the same, but it comes from scancel, or when the time is over: no requeue after it.
launcher='' signalled='' announced='' terminated=''
pass_on() {
    signalled=yes announced=yes
    if [ -z "$launcher" ]; then return; fi
    trap '' USR1 # once is enough
    kill -USR1 "$launcher" 2>/dev/null
}
trap pass_on USR1
trap 'terminated=yes; pass_on' TERM

# In the background: bash runs a trap only when it is not waiting for a command in the foreground.
# `srun --mpi=list` tells what there is besides @{mpi_plugin}. Since 22.05 srun has to be told --cpus-per-task again.
srun --mpi=@{mpi_plugin} --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
mpirun -n @{mpirun_tasks} \
    @{mpi_options} \
    @{command} &
launcher=$!
# It came before there was a launcher; one that has only just been started would not hear it.
if [ -n "$signalled" ]; then sleep 1; pass_on; fi

# A signal ends `wait` early, with a code above 128, while the launcher still runs: wait again for its own code.
signalled=''
wait "$launcher"
code=$?
while [ -n "$signalled" ] && [ "$code" -gt 128 ]; do
    signalled=''
    wait "$launcher" 2>/dev/null
    again=$?
    # 127: there is nothing left to wait for, so the code before was the launcher's own.
    if [ "$again" -ne 127 ]; then code=$again; fi
done
trap '' USR1 TERM # nothing is left to signal, and this shell has yet to say how it ended

# Another turn? 75: training saved, and wants one. An end by a signal after USR1: a rank did not listen yet, or did not
# end in time (MPICH's mpirun tells the signals' numbers, 9 to 15, or a mixture). And a host that answers no more has
# lost its ranks, which Slurm may take minutes to notice. All else is the job's own.
ask() { timeout 60 srun --overlap --nodes=1 --ntasks=1 --mpi=none --nodelist="$1" true >/dev/null 2>&1; }
why=''
if [ "$code" -eq 75 ]; then
    why='saved'
elif [ -n "$announced" ] && { [ "$code" -gt 128 ] || [[ $code =~ ^(9|1[0-5])$ ]]; }; then
    why="ended by a signal after USR1 (exit code $code), on from what hvdx.keras.Checkpoint last saved, if anything"
elif [ "$code" -ne 0 ] && [ -z "$terminated" ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # Where not even this host answers, it is the question that does not work here.
    lost=$(if ask "$SLURMD_NODENAME"; then for host in $hosts; do { ask "$host" || echo "$host"; } & done; wait; fi)
    if [ -n "$lost" ]; then why="lost ${lost//$'\n'/, } (exit code $code)"; fi
fi
if [ -n "$why" ] && [ -z "$terminated" ]; then
    code=75
    # The task alone, where this is one of an array.
    job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
        echo "$why; job $job goes back into the queue"
        scontrol requeue "$job" || echo "job $job was not requeued; submit it again to go on" >&2
    else
        echo "$why; not requeued, as there were $max_restarts restarts; submit it again to go on" >&2
    fi
fi
exit "$code"
