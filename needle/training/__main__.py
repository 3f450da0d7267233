"""`python -m needle.training`."""

import sys

from .command import main

sys.exit(main())
