"""Entry point of `python -m hvdx`, which equals the command `hvdx`."""

import sys

from hvdx.cli.main import main

sys.exit(main())
