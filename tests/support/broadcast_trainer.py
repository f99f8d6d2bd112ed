"""A trainer process that broadcasts the weights of a folder to a running server.

Run as `python broadcast_trainer.py URL FOLDER PORT TP_SIZE flattened|plain`. It prints the server's
answers.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file

from headrace.trainer import broadcast_weights, describe_tensors, init_update_group


def main() -> None:
    url, folder, port, tp_size, form = sys.argv[1:]
    world = 1 + int(tp_size)

    def post(path: str, **body: Any) -> dict[str, Any]:
        return httpx.post(url + path, json=body, timeout=120).json()

    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(load_file(path))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            post,
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=int(port),
            rank_offset=1,
            world_size=world,
            backend="gloo",
        )
        group = init_update_group("127.0.0.1", int(port), world, backend="gloo")
        answers = [joining.result()]
        half = len(tensors) // 2
        items = list(tensors.items())
        # The weights are sent in two calls, so that the parts of fused weights arrive separately.
        for number, part in enumerate((items[:half], items[half:])):
            updating = pool.submit(
                post,
                "/update_weights_from_distributed",
                **describe_tensors(part),
                load_format="flattened_bucket" if form == "flattened" else None,
                weight_version=f"broadcast-{number}",
            )
            broadcast_weights(part, group, flattened=form == "flattened")
            answers.append(updating.result())
    answers.append(post("/destroy_weights_update_group"))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
