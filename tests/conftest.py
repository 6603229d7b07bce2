"""What must be set before numpy is imported: tests run in parallel processes, and small products are slower on many threads."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
