"""`eval.quality`"""

import sys

from eval.quality.command import main

sys.exit(main())
