#!/bin/bash
# @{made_by}
# Start it on the first host. Keep it and edit it: the job does only what this file says.
# The other hosts must accept ssh without a password, and have the same files at the same paths.

@{env_setup}
export HVDX_STRATEGY=@{strategy}
export OMP_NUM_THREADS=@{threads}
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # Python orders sets of strings in the same way on all ranks

# horovodrun passes no signal on, and USR1 kills it. To make training save and end, send USR1 to the mpirun below it:
#     pkill -USR1 -x 'mpirun|prterun'
# The exit code is then 75. Nothing restarts the job: it has no time limit, so USR1 means that it should stop.
# Start this file again to resume training.
# The binding arguments are Horovod's own, written with two dashes as Open MPI 5 requires.
exec horovodrun --mpi -np @{tasks} --hostfile @{hosts} \
    --binding-args="@{binding}" \
    @{command}
