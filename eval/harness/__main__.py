"""`eval.harness`"""

import sys

from eval.harness.command import main

sys.exit(main())
