"""What the interpreter imports at its start, if this folder is on its path."""

import random_pauses

random_pauses.install()
