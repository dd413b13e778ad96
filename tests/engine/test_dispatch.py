"""Dispatch over real stores and engines: each prompt once, the same samples whoever takes it."""

from __future__ import annotations

import threading
from datetime import timedelta

import tiny_models
from torch.distributed import HashStore, TCPStore

from megarl.config.schema import RolloutConfig
from megarl.rollout import Completion, SamplingParams, create_engine
from megarl.rollout.dispatch import SharedCounter, dispatch

PROMPTS = tiny_models.prompts(10)
SAMPLING = SamplingParams(max_new_tokens=8, num_samples=2)
CONFIG = RolloutConfig(engine="hf", max_running_requests=4)


def test_a_counter_gives_each_number_to_one_process() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
    mine, theirs = SharedCounter(store, "step/1"), SharedCounter(other, "step/1")
    assert [mine.next(), theirs.next(), theirs.next(), mine.next()] == [0, 1, 2, 3]
    assert SharedCounter(other, "step/2").next() == 0


def test_replicas_share_the_prompts_and_results_do_not_depend_on_the_sharing(model_a: str) -> None:
    engines = [create_engine(CONFIG, model_path=model_a, dtype="float32") for _ in range(2)]
    alone = dispatch(engines[0], PROMPTS, SAMPLING, SharedCounter(HashStore(), "a"), seed=3)
    assert sorted(alone) == list(range(10))

    counter = SharedCounter(HashStore(), "b")
    parts: list[dict[int, list[Completion]]] = [{}, {}]

    def work(replica: int) -> None:
        parts[replica] = dispatch(engines[replica], PROMPTS, SAMPLING, counter, seed=3)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not parts[0].keys() & parts[1].keys()
    together = parts[0] | parts[1]
    assert {k: [c.response_ids for c in v] for k, v in together.items()} == {
        k: [c.response_ids for c in v] for k, v in alone.items()
    }


def test_another_seed_gives_other_samples(model_a: str) -> None:
    engine = create_engine(CONFIG, model_path=model_a, dtype="float32")
    first, second = (
        dispatch(engine, PROMPTS, SAMPLING, SharedCounter(HashStore(), "x"), seed=s) for s in (1, 2)
    )
    assert [first[i][0].response_ids for i in range(10)] != [
        second[i][0].response_ids for i in range(10)
    ]


def test_no_prompts_left_is_an_empty_share(model_a: str) -> None:
    engine = create_engine(CONFIG, model_path=model_a, dtype="float32")
    counter = SharedCounter(HashStore(), "y")
    assert dispatch(engine, [], SAMPLING, counter, seed=0) == {}
