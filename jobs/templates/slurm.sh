#!/bin/bash
# @{made_by}
# Submit with sbatch. Keep it and edit it: the job does only what this file says.
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
# After a requeue, append the output to the same file.
#SBATCH --open-mode=append
#SBATCH --requeue
# Send USR1 to this shell only (B:), this many seconds before the time limit, so that training saves.
#SBATCH --signal=B:USR1@@{signal}
#SBATCH @{directives}

# Change to the folder of this file, wherever it was submitted from. Slurm runs a copy, so $0 does not name it.
folder=$(scontrol show job "$SLURM_JOB_ID" | sed -n '/^ *Command=\//{s|^[^/]*\(/.*\)/[^/]*$|\1|p;q}')
cd "${folder:-.}" || exit 1
# After `sbatch --export=NONE`, this variable would keep srun from passing on the variables exported below.
unset SLURM_EXPORT_ENV

max_restarts=@{max_restarts} # how often the job may go back into the queue

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # Python orders sets of strings in the same way on all ranks

@{exports}

# On USR1, this shell sends USR1 to the launcher, and the launcher to all ranks: training saves and ends with code 75.
# On TERM, from scancel or at the time limit, it does the same, but the job is not requeued.
@{before_launch}

# The launcher runs in the background, because bash runs no trap while it waits for a command in the foreground.
# `srun --mpi=list` lists the alternatives to @{mpi_plugin}. Since Slurm 22.05, srun needs --cpus-per-task again.
srun --mpi=@{mpi_plugin} --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
mpirun -n @{mpirun_tasks} \
hvdx run @{supervised} \
    @{mpi_options} \
    @{command} &
launcher=$!
@{after_launch}
if [ -n "$why" ] && [ -z "$terminated" ]; then
    code=75
    # In a job array, requeue only this task.
    job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
        echo "$why; job $job goes back into the queue"
        scontrol requeue "$job" || echo "job $job was not requeued; submit it again to resume" >&2
    else
        echo "$why; not requeued, as there were $max_restarts restarts; submit it again to resume" >&2
    fi
fi
exit "$code"
