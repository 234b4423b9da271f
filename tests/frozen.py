"""What the server of apart.py imports last: its programs need not collect what it has imported."""

import gc

gc.freeze()
