"""`eval.speed`"""

import sys

from eval.speed.command import main

sys.exit(main())
