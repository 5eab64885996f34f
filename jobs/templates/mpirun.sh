#!/bin/bash
# @{made_by}
# Start it on the first host. Keep it and edit it: the job does only what this file says.
# The other hosts must accept ssh without a password, and have the same files at the same paths.

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # Python orders sets of strings in the same way on all ranks

@{exports}

# exec: mpirun replaces this shell, so that signals reach it. It passes USR1 on to all ranks: training saves and ends
# with code 75. Nothing restarts the job: it has no time limit, so USR1 means that it should stop.
# Start this file again to resume training.
exec mpirun -n @{tasks} @{hostfile_option} @{hosts} \
    @{mpi_options} \
    @{command}
