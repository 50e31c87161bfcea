"""``python -m htsrl`` is ``htsrl``."""

import sys

from htsrl.cli import main

sys.exit(main())
