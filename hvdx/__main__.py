"""`python -m hvdx`, the same as `hvdx`."""

import sys

from hvdx.cli.main import main

sys.exit(main())
