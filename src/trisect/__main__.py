"""`python -m trisect`, and with it `torchrun -m trisect`."""

import sys

from trisect.cli import main

sys.exit(main())
