"""`eval.prefix`"""

import sys

from eval.prefix.command import main

sys.exit(main())
