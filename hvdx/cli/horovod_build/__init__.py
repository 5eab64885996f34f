"""The parts of `hvdx build-horovod`, one subject a file.

needs.py       what the build has to find on this machine, and what to do about what is missing
tools.py       the Python packages that the build uses
source.py      Horovod's source: downloaded, checked, unpacked
patches.py     what has to change in that source, and why
wheel.py       running the build
progress.py    showing how far it is
cache.py       keeping the wheels
install.py     putting a wheel into the environment, and proving that it works
"""
