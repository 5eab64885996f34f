"""The `hvdx` command. `main.py` lists the sub-commands. Each has its own file, and its longer parts are in a folder.

batch/           batch systems: the scripts of `hvdx job`, and the test jobs of `hvdx doctor --batch`
diagnosis/       the checks of `hvdx doctor`
emulation/       the hosts and links of `hvdx lab`
horovod_build/   the parts of `hvdx build-horovod`
common/          helpers that several commands share
"""
