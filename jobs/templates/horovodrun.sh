#!/bin/bash
# @{made_by}
# Start it on the first host. Keep it, and change what you like: nothing but what stands here happens.
# The other hosts are reached by ssh without a password, and have the same files at the same places.

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}

# horovodrun passes no signal on, and dies of USR1. To have training saved, send USR1 to the mpirun below it:
#     pkill -USR1 -x 'mpirun|prterun'
# The exit code is then 75. No loop starts it again: no time limit ends a job here, so whoever sends USR1 wants it to
# stop. Start this file again to go on.
# The binding arguments are Horovod's own with two dashes, as Open MPI 5 wants them.
exec horovodrun --mpi -np @{tasks} --hostfile @{hosts} \
    --binding-args="@{binding}" \
    @{command}
