"""`python -m torch2needle`."""

import sys

from .command import main

sys.exit(main())
