"""Triton's Python backend: a saved net `model.needle` beside this file, run by needle. Names and sizes are config.pbtxt's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

import needle as ndl


class TritonPythonModel:
    """Every instance is a process of its own with one of these."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        (x,), (y,), largest = config["input"], config["output"], config["max_batch_size"]
        self.input, self.output = x["name"], y["name"]
        ndl.set_num_threads(int(config["parameters"]["threads"]["string_value"]))
        net = ndl.load(Path(args["model_repository"]) / args["model_version"] / "model.needle")
        example = np.zeros((1, *map(int, x["dims"])), "float32")
        # Plans for batches of every size, before the first request; weights are packed once for all.
        self.run: Any = ndl.compile(net, (example,), sizes={f"{net.graph.inputs[0].target}.0": (1, largest)})
        self.run(example)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Requests that Triton gathered, each of one or more images: run as one batch, results cut apart again."""
        images = [pb_utils.get_input_tensor_by_name(r, self.input).as_numpy() for r in requests]
        try:
            scores = self.run(np.concatenate(images))
        except (ValueError, RuntimeError) as e:
            return [pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(e))) for _ in requests]
        parts = np.split(scores, np.cumsum([len(i) for i in images])[:-1])
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(self.output, p)]) for p in parts]

    def finalize(self) -> None:
        del self.run
