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
@{before_launch}

# In the background: bash runs a trap only when it is not waiting for a command in the foreground.
# `srun --mpi=list` tells what there is besides @{mpi_plugin}. Since 22.05 srun has to be told --cpus-per-task again.
srun --mpi=@{mpi_plugin} --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
mpirun -n @{mpirun_tasks} \
    @{mpi_options} \
    @{command} &
launcher=$!
@{after_launch}
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
