"""`python -m eval.card`"""

import sys

from eval.card.command import main

sys.exit(main())
