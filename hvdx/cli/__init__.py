"""The `hvdx` command: one sub-command a file, found by `main.py`; what belongs to a subject lies in its folder.

batch/           batch systems: the scripts of `hvdx job`, and the jobs that `hvdx doctor --batch` tries
diagnosis/       the checks of `hvdx doctor`
emulation/       the hosts and links of `hvdx lab`
horovod_build/   the parts of `hvdx build-horovod`
common/          what several commands use
"""
