"""The parts of `hvdx build-horovod`, a file for each subject.

needs.py       the build's requirements on this machine, with remedies for missing ones
tools.py       the Python packages that the build uses
source.py      Horovod's source: downloaded, checked, unpacked
patches.py     the changes to that source, with reasons
wheel.py       the build
progress.py    the progress line of the build
cache.py       the cached wheels
install.py     installation of a wheel, and a test with two workers
"""
