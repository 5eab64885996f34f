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
launcher='' signalled='' announced='' terminated=''
pass_on() {
    signalled=yes announced=yes
    if [ -z "$launcher" ]; then return; fi
    trap '' USR1 # once is enough
    kill -USR1 "$launcher" 2>/dev/null
}
trap pass_on USR1
trap 'terminated=yes; pass_on' INT TERM

# In the background: bash runs a trap only when it is not waiting for a command in the foreground.
jsrun --nrs=@{jsrun_tasks} --tasks_per_rs=1 \
    --cpu_per_rs=@{jsrun_cores} --bind=none \
    --gpu_per_rs=@{jsrun_gpus} \
mpirun -n @{mpirun_tasks} @{hostfile_option} "$LSB_DJOB_HOSTFILE" \
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
trap '' USR1 INT TERM # nothing is left to signal, and this shell has yet to say how it ended

# Another turn? 75: training saved, and wants one. An end by a signal after USR1: a rank did not listen yet, or did not
# end in time (MPICH's mpirun tells the signals' numbers, 9 to 15, or a mixture). And a host that answers no more has
# lost its ranks, which LSF may take minutes to notice. All else is the job's own.
ask() { timeout 60 blaunch "$1" true >/dev/null 2>&1; }
why='' hosts=''
if [ "$code" -eq 75 ]; then
    why='saved'
elif [ -n "$announced" ] && { [ "$code" -gt 128 ] || [[ $code =~ ^(9|1[0-5])$ ]]; }; then
    why="ended by a signal after USR1 (exit code $code), on from what hvdx.keras.Checkpoint last saved, if anything"
elif [ "$code" -ne 0 ] && [ -z "$terminated" ]; then
    hosts=$(sort -u @{hosts_of_slots})
    # Where not even this host answers, it is the question that does not work here.
    lost=$(if ask "$(head -n 1 "$LSB_DJOB_HOSTFILE")"; then for host in $hosts; do { ask "$host" || echo "$host"; } & done; wait; fi)
    if [ -n "$lost" ]; then why="lost ${lost//$'\n'/, } (exit code $code)"; fi
fi
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
