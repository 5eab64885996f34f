#!/bin/bash
# @{made_by}
# Start it on the first host. Keep it, and change what you like: nothing but what stands here happens.
# The other hosts are reached by ssh without a password, and have the same files at the same places.

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}

@{exports}

# In place of this shell, so that signals reach mpirun, which passes USR1 on to all ranks: training saves, and the exit
# code is 75. No loop starts it again: no time limit ends a job here, so whoever sends USR1 wants it to stop.
# Start this file again to go on.
exec mpirun -n @{tasks} @{hostfile_option} @{hosts} \
    @{mpi_options} \
    @{command}
