"""A process of its own with an engine in it, for tests about processes.

`engine MODEL TP`: starts an engine, checks a few log-probs, prints one JSON line, then generates
until killed.
`export MODEL TP RANK FILE`: exports that rank's shard into FILE, then waits until killed.
"""

from __future__ import annotations

import json
import pickle
import sys
import time

import tiny_models
import torch

from megarl.config.schema import RolloutConfig
from megarl.rollout import (
    GenerationRequest,
    SamplingParams,
    create_engine,
    engine_class,
    engine_weight_layout,
)


def run_engine(path: str, tp: int) -> None:
    config = RolloutConfig(tp=tp, max_total_tokens=4096, start_timeout_s=150.0)
    engine = create_engine(config, model_path=path, dtype="float32", num_threads=1)
    model, prompts = tiny_models.load(path), tiny_models.prompts(4)
    requests = [GenerationRequest(key=i, prompt_ids=p, seed=i) for i, p in enumerate(prompts)]
    worst = 0.0
    for key, (completion,) in engine.generate(requests, SamplingParams(max_new_tokens=12)):
        truth = tiny_models.true_log_probs(model, prompts[key], completion.response_ids, 1.0)
        worst = max(worst, *(abs(a - b) for a, b in zip(truth, completion.log_probs, strict=True)))
    pids = [child.pid for child in engine._process.children]
    print(json.dumps({"worst": worst, "pids": pids}), flush=True)
    while True:
        list(engine.generate(requests, SamplingParams(max_new_tokens=100)))


def run_export(path: str, tp: int, rank: int, file: str) -> None:
    config = RolloutConfig(tp=tp)
    export = engine_class(config).export_shard
    shard = tiny_models.shard(engine_weight_layout(config, model_path=path, tp_rank=rank), path)
    exported = {name: export(tensor) for name, tensor in shard.items()}
    with open(file, "wb") as f:
        pickle.dump(exported, f)
    print("ready", flush=True)
    time.sleep(300)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2], int(sys.argv[3]))
    else:
        run_export(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
