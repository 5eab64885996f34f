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

# How often the job may put itself back into the queue.
max_restarts=@{max_restarts}

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}

@{exports}

# USR1 goes on to the launcher, and from there to all ranks: training saves, and ends with code 75.
# TERM means the same, but it comes from scancel, or when the time is over: no requeue after it.
launcher='' signalled='' terminated=''
pass_on() {
    signalled=yes
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

# 75: saved, and wants another turn. All other codes are the job's.
if [ "$code" -eq 75 ] && [ -z "$terminated" ]; then
    # The task alone, where this is one of an array.
    job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
        echo "saved; job $job goes back into the queue"
        scontrol requeue "$job" || echo "job $job was not requeued; submit it again to go on" >&2
    else
        echo "saved; not requeued, as there were $max_restarts restarts; submit it again to go on" >&2
    fi
fi
exit "$code"
