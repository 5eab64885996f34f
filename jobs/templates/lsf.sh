#!/bin/bash
# @{made_by}
# Submit with: bsub < this file. Keep it and edit it: the job does only what this file says.
#BSUB -J "@{name}"
#BSUB -P @{account}
#BSUB -q @{queue}
#BSUB -n @{tasks_by_slot}
#BSUB -R "span[ptile=@{ptile}]"
#BSUB -R "affinity[core(@{cores_by_slot})]"
#BSUB -nnodes @{nnodes}
#BSUB -gpu "num=@{gpus_by_host}:j_exclusive=yes"
#BSUB -W @{time}
#BSUB -o @{output}
# Send USR1 to the job this many minutes before the time limit, so that training saves.
#BSUB -wa USR1
#BSUB -wt @{signal_minutes}
# LSF puts the job back into the queue after a host failure and after exit code 75.
#BSUB -r
#BSUB -Q "75"
#BSUB @{directives}

# How often the job may go back into the queue. LSF does not report the number of requeues, so a small file counts them.
max_restarts=@{max_restarts}
counter=.restarts.$LSB_JOBID.${LSB_JOBINDEX:-0}

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}
export HVDX_CPUS_PER_TASK=@{cpus_per_task}
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # Python orders sets of strings in the same way on all ranks

@{exports}

# On USR1, this shell sends USR1 to the launcher, and the launcher to all ranks: training saves and ends with code 75.
# On INT and TERM, from bkill or at the time limit, it does the same, but the job is not requeued.
@{before_launch}

# The launcher runs in the background, because bash runs no trap while it waits for a command in the foreground.
jsrun --nrs=@{jsrun_tasks} --tasks_per_rs=1 \
    --cpu_per_rs=@{jsrun_cores} --bind=none \
    --gpu_per_rs=@{jsrun_gpus} \
mpirun -n @{mpirun_tasks} @{hostfile_option} "$LSB_DJOB_HOSTFILE" \
hvdx run @{supervised} \
    @{mpi_options} \
    @{command} &
launcher=$!
@{after_launch}
restarts=$(cat "$counter" 2>/dev/null || echo 0)
if [ "$code" -eq 75 ] && [ -n "$terminated" ]; then
    code=143 # saved, but cancelled: return the usual code after TERM, since LSF requeues on 75
elif [ -n "$why" ] && [ -z "$terminated" ] && [ "$restarts" -lt "$max_restarts" ]; then
    echo "$why; the job goes back into the queue" # by LSF, on code 75
    echo "$((restarts + 1))" >"$counter"
    exit 75
elif [ -n "$why" ] && [ -z "$terminated" ]; then
    echo "$why; not requeued, as there were $max_restarts restarts; submit it again to resume" >&2
    code=1
fi
rm -f "$counter"
exit "$code"
