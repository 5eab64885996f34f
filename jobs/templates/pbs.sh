#!/bin/bash
# @{made_by}
# Submit with qsub. Keep it, and change what you like: nothing but what stands here happens.
#PBS -N @{name}
#PBS -A @{account}
#PBS -q @{queue}
#PBS -l select=@{select}
#PBS -l place=scatter
#PBS -l walltime=@{time}
#PBS -j oe
#PBS -o @{output}
#PBS -r y
#PBS @{directives}

# PBS sends no signal in good time, so this script has a clock of its own.
walltime=@{seconds}   # seconds; the same as above
save_before=@{signal} # seconds before the end
# How often the job may submit itself again.
max_restarts=@{max_restarts}

cd "$PBS_O_WORKDIR" || exit 1
@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}

@{exports}

# USR1 (from `qsig -s USR1 JOB`, or the clock) goes to all ranks: training saves, and ends with code 75.
# TERM means the same, but it comes from qdel, or when the time is over: the job is not submitted again after it.
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
# `timeout` is the clock: it sends USR1 when time is short, passes on those of above, and ends with mpirun's code.
clock=$((walltime - save_before - SECONDS)) # SECONDS: how long this shell has been running
timeout --foreground --preserve-status --signal=USR1 "$((clock > 0 ? clock : 1))" \
    mpirun -n @{tasks} @{hostfile_option} "$PBS_NODEFILE" \
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
# lost its ranks, which PBS may take minutes to notice. All else is the job's own.
ask() { timeout 60 pbs_tmrsh "$1" true >/dev/null 2>&1; }
why=''
if [ "$code" -eq 75 ]; then
    why='saved'
elif [ -n "$announced" ] && { [ "$code" -gt 128 ] || [[ $code =~ ^(9|1[0-5])$ ]]; }; then
    why="ended by a signal after USR1 (exit code $code), on from what hvdx.keras.Checkpoint last saved, if anything"
elif [ "$code" -ne 0 ] && [ -z "$terminated" ]; then
    hosts=$(sort -u "$PBS_NODEFILE")
    # Where not even this host answers, it is the question that does not work here.
    lost=$(if ask "$(head -n 1 "$PBS_NODEFILE")"; then for host in $hosts; do { ask "$host" || echo "$host"; } & done; wait; fi)
    if [ -n "$lost" ]; then why="lost ${lost//$'\n'/, } (exit code $code)"; fi
fi
# Only operators may qrerun, so the job submits itself: $0 is the copy of this file that PBS keeps while the job runs.
# What was said on qsub's command line, and not in this file, is not said again.
if [ -n "$why" ] && [ -z "$terminated" ]; then
    code=75
    if [ "${HVDX_RESTARTS:-0}" -lt "$max_restarts" ]; then
        echo "$why; submitting the job again"
        qsub -v HVDX_RESTARTS="$((${HVDX_RESTARTS:-0} + 1))" "$0" || echo "not submitted; do it by hand to go on" >&2
    else
        echo "$why; not submitted, as there were $max_restarts restarts; submit it again to go on" >&2
    fi
fi
exit "$code"
