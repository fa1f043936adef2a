"""Python reads this first in every process that a test starts, because conftest.py puts its folder on PYTHONPATH.

With the usual thresholds, garbage collection takes a fifth of importing torch and transformers.
"""

import gc

gc.set_threshold(50_000, 20, 100)
