"""`python -m optimus_compiler` is `optimus`."""

import sys

from optimus_compiler.cli.main import main

sys.exit(main())
