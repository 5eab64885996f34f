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
@{before_launch}

# In the background: bash runs a trap only when it is not waiting for a command in the foreground.
# `timeout` is the clock: it sends USR1 when time is short, passes on those of above, and ends with mpirun's code.
clock=$((walltime - save_before - SECONDS)) # SECONDS: how long this shell has been running
timeout --foreground --preserve-status --signal=USR1 "$((clock > 0 ? clock : 1))" \
    mpirun -n @{tasks} @{hostfile_option} "$PBS_NODEFILE" \
    @{mpi_options} \
    @{command} &
launcher=$!
@{after_launch}
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
