"""Runs in a peer's own Python, by its path: shapes in as JSON, a line of JSON out for each. It imports nothing of flashsim.

    python peer_programs.py pipeweave|llmcompass FOLDER < shapes.json

First line out: {"ready_s"}, seconds to import and load; then {"index", "seconds", "ms"} a shape, or "reason" in place of "ms".
Seconds are of processor time.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Shape = dict[str, Any]
Predict = Callable[[Shape], float]


def pipeweave(folder: Path) -> Predict:
    """Features of its FlashInfer tile rules, then its trained network, as its aggregator runs them (it fixes a causal mask).

    Its data sets are GEMM's alone, and too large for a clone without large files: it is told of a folder that is not there."""
    aggregator = import_module("aggregator")
    places = {"model_dir": folder / "mlp_models", "hardware_dir": folder / "hardware", "dataset_dir": folder / "no-dataset"}
    paths = {name: str(place) for name, place in places.items()}
    loaded = {chip: aggregator.DurationPredictor(chip, **paths) for chip in ("A100", "H100", "H200")}

    def predict(shape: Shape) -> float:
        peer = loaded[shape["peer_gpu"]]
        features = peer.generate_attn_features(
            shape["batch"], [shape["seqlen_q"]] * shape["batch"], [shape["seqlen_kv"]] * shape["batch"],
            shape["heads_q"], shape["heads_kv"], shape["head_dim"], f"{shape['kernel']}_ragged",
        )  # fmt: skip
        return float(peer.predict_operator_duration("attn", features, float(features[1])))  # [1]: cycles of all tensor work

    return predict


def llmcompass(folder: Path) -> Predict:
    """Its unfused attention: Q K^T, softmax and P V, each with its own launch overhead. The chip's memory bandwidth is set."""
    matmul, softmax = import_module("software_model.matmul"), import_module("software_model.softmax")
    utils, device = import_module("software_model.utils"), import_module("hardware_model.device")
    half = utils.data_type_dict["fp16"]

    def predict(shape: Shape) -> float:
        chip = copy.deepcopy(device.device_dict[shape["peer_gpu"]])
        chip.io_module.bandwidth = shape["hbm_bytes_per_s"]
        rows, queries, keys, dim = shape["batch"] * shape["heads_q"], shape["seqlen_q"], shape["seqlen_kv"], shape["head_dim"]
        overhead = chip.compute_module.overhead
        seconds = 2 * overhead.matmul + overhead.softmax
        for m, k, n in ((queries, dim, keys), (queries, keys, dim)):
            product = matmul.BatchedMatmul(data_type=half)
            product(utils.Tensor([rows, m, k]), utils.Tensor([rows, k, n]))
            seconds += product.compile_and_simulate(chip, compile_mode="heuristic-GPU")
        middle = softmax.Softmax(data_type=half)
        middle(utils.Tensor([rows * queries, keys]))
        seconds += middle.compile_and_simulate(chip, compile_mode="heuristic-GPU")
        return 1e3 * float(seconds)

    return predict


PEERS: dict[str, Callable[[Path], Predict]] = {"pipeweave": pipeweave, "llmcompass": llmcompass}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer
    shapes, folder = json.load(sys.stdin), Path(sys.argv[2]).resolve()
    began = time.perf_counter()
    os.chdir(folder)  # peers read their tables by relative paths
    sys.path[0] = str(folder)
    predict = PEERS[sys.argv[1]](folder)
    print(json.dumps({"ready_s": time.perf_counter() - began}), file=out, flush=True)
    for index, shape in enumerate(shapes):
        began = time.process_time()  # neighbours on a shared machine do not count
        try:
            answer: dict[str, Any] = {"ms": predict(shape)}
        except Exception as error:  # the peer's own; the next shape may do
            answer = {"reason": f"{type(error).__name__}: {error}"}
        print(json.dumps({"index": index, "seconds": time.process_time() - began, **answer}), file=out, flush=True)


if __name__ == "__main__":
    main()
