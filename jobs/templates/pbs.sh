#!/bin/bash
# @{made_by}
# Submit with qsub. Keep it and edit it: the job does only what this file says.
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

# PBS sends no signal early enough to save, so this script has its own timer.
walltime=@{seconds}   # seconds; the same as above
save_before=@{signal} # seconds before the time limit
# How often the job may submit itself again.
max_restarts=@{max_restarts}

cd "$PBS_O_WORKDIR" || exit 1
@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # Python orders sets of strings in the same way on all ranks

@{exports}

# On USR1, from the timer or from `qsig -s USR1 JOB`, all ranks get USR1: training saves and ends with code 75.
# On TERM, from qdel or at the time limit, they get it too, but the job is not submitted again.
@{before_launch}

# The launcher runs in the background, because bash runs no trap while it waits for a command in the foreground.
# `timeout` is the timer: it sends USR1 before the time limit, passes on USR1 from this shell, returns mpirun's code.
timer=$((walltime - save_before - SECONDS)) # SECONDS: run time of this shell so far
timeout --foreground --preserve-status --signal=USR1 "$((timer > 0 ? timer : 1))" \
    mpirun -n @{mpirun_tasks} @{hostfile_option} "$PBS_NODEFILE" \
    hvdx run @{supervised} \
    @{mpi_options} \
    @{command} &
launcher=$!
@{after_launch}
# Only operators may call qrerun, so the job submits itself: $0 is PBS's copy of this file, kept while the job runs.
# Options from qsub's command line are not repeated.
if [ -n "$why" ] && [ -z "$terminated" ]; then
    code=75
    if [ "${HVDX_RESTARTS:-0}" -lt "$max_restarts" ]; then
        echo "$why; submitting the job again"
        qsub -v HVDX_RESTARTS="$((${HVDX_RESTARTS:-0} + 1))" "$0" || echo "not submitted; submit it again to resume" >&2
    else
        echo "$why; not submitted, as there were $max_restarts restarts; submit it again to resume" >&2
    fi
fi
exit "$code"
