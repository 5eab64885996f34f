"""The parts of `hvdx build-horovod`, a file for each subject.

needs.py       the build's requirements on this machine, with remedies for missing ones, and its Python packages
source.py      Horovod's source: downloaded, checked, unpacked; and the changes to it, with reasons
wheel.py       the wheel: built, cached, installed, and tested with two workers
"""
