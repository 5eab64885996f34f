#!/bin/bash
# @{made_by}
# Submit with: bsub < this file. Keep it, and change what you like: nothing but what stands here happens.
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
# USR1 to the job, so many minutes before the end: time to save.
#BSUB -wa USR1
#BSUB -wt @{signal_minutes}
# After a host failed, and after exit code 75, LSF puts the job back into the queue.
#BSUB -r
#BSUB -Q "75"
#BSUB @{directives}

# How often the job may go back into the queue. LSF does not tell how often it did, so a small file counts.
max_restarts=@{max_restarts}
counter=.restarts.$LSB_JOBID.${LSB_JOBINDEX:-0}

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}
export HVDX_CPUS_PER_TASK=@{cpus_per_task}

@{exports}

# USR1 goes on to the launcher, and from there to all ranks: training saves, and ends with code 75.
# INT and TERM mean the same, but they come from bkill, or when the time is over: no requeue after them.
@{before_launch}

# In the background: bash runs a trap only when it is not waiting for a command in the foreground.
jsrun --nrs=@{jsrun_tasks} --tasks_per_rs=1 \
    --cpu_per_rs=@{jsrun_cores} --bind=none \
    --gpu_per_rs=@{jsrun_gpus} \
mpirun -n @{mpirun_tasks} @{hostfile_option} "$LSB_DJOB_HOSTFILE" \
    @{mpi_options} \
    @{command} &
launcher=$!
@{after_launch}
restarts=$(cat "$counter" 2>/dev/null || echo 0)
if [ "$code" -eq 75 ] && [ -n "$terminated" ]; then
    code=143 # saved, but somebody wants it to end; 143 is the usual code after TERM
elif [ -n "$why" ] && [ -z "$terminated" ] && [ "$restarts" -lt "$max_restarts" ]; then
    echo "$why; the job goes back into the queue" # LSF does that, on code 75
    echo "$((restarts + 1))" >"$counter"
    exit 75
elif [ -n "$why" ] && [ -z "$terminated" ]; then
    echo "$why; not requeued, as there were $max_restarts restarts; submit it again to go on" >&2
    code=1
fi
rm -f "$counter"
exit "$code"
