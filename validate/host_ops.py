"""Host time per framework call: eager PyTorch operations on tensors too small to keep the GPU busy.

Run where PyTorch and a GPU are:  python3 validate/host_ops.py OUT.csv
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from pathlib import Path


def main(out: str) -> None:
    """Write one row an operation: microseconds of host time a call, median of 9 runs of 500 calls."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    a = torch.randn(4, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    mask = torch.zeros(4, 64, 64, device="cuda", dtype=torch.bool)
    q = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.float16)
    operations = {
        "bmm": lambda: torch.bmm(a, a),
        "mul": lambda: a * 0.5,
        "masked_fill": lambda: a.masked_fill(mask, 0.0),
        "softmax": lambda: torch.softmax(a, -1),
        "dropout": lambda: torch.nn.functional.dropout(a, 0.1),
        "einsum": lambda: torch.einsum("bij,bkj->bik", a, a),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
    }
    with Path(out).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["operation", "us", "spread", "torch", "gpu"])
        for name, call in operations.items():
            runs = []
            for _ in range(9):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(500):
                    call()  # type: ignore[no-untyped-call, unused-ignore]
                runs.append((time.perf_counter() - start) / 500 * 1e6)
            middle = statistics.median(runs)
            spread = (max(runs) - min(runs)) / middle
            writer.writerow([name, f"{middle:.2f}", f"{spread:.2f}", torch.__version__, torch.cuda.get_device_name()])


if __name__ == "__main__":
    main(sys.argv[1])
