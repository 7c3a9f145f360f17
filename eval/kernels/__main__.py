"""`eval.kernels`"""

import sys

from eval.kernels.command import main

sys.exit(main())
