"""SGLangEngine: one replica of the actor on real SGLang, on CPU or CUDA.

Token ids in, token ids out; each tensor-parallel rank of the engine is given only its own shard of
a push.
Where this sits: `dispatch` feeds it prompts, `reshard` its weights. Processes are sglang_process's
business.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

from megarl.config.schema import RolloutConfig
from megarl.rollout import shards
from megarl.rollout.base import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    WeightSyncError,
)
from megarl.rollout.model_files import end_of_sequence_ids, read_hf_config, require_weights
from megarl.rollout.seeds import derive_seed
from megarl.rollout.sglang_args import server_args, worker_environment
from megarl.rollout.sglang_layout import sglang_weight_layout
from megarl.rollout.sglang_process import EngineProcess
from megarl.rollout.sglang_worker import INSTALL, REPORT_DIGESTS, REPORT_SHAPES, report_path
from megarl.rollout.shards import ExportedShard, PushLedger, export_shard, read_shard
from megarl.types import FinishReason, WeightLayout

__all__ = ["SGLangEngine"]

_PREFIX_TOKENS = 32  # prompts at least this long are prefilled once for all their samples
_CONTROL_TIMEOUT_S = 600.0  # limit of a weight, memory or report call
_MEMORY_TAGS = ("weights", "kv_cache")


class SGLangEngine(RolloutEngine):
    """See RolloutEngine. Start and use it from the main thread of one process.

    Each sample draws from a stream of its own, (request seed, sample index, position): results do
    not depend on what else runs, up to rounding of the logits.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: str,
        dtype: str,
        devices: Sequence[int] | None = None,
        num_threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            config: section `rollout`.
            model_path: Hugging Face folder.
            dtype: "float32" or "bfloat16".
            devices: CUDA device of each engine rank, numbered as this process sees them; None: CPU.
            num_threads: cores of this replica on CPU, shared out over its ranks; None: torch's
                default.
            seed: seed of what has no seed of its own.

        Raises:
            RolloutError: it did not start, or holds other parameters than its layout says.
        """
        require_weights(model_path)
        self.config, self.tp = config, config.tp
        self.dtype = getattr(torch, dtype)
        self._stop_ids = end_of_sequence_ids(model_path)
        hf_config = read_hf_config(model_path)
        try:
            self._layouts = [sglang_weight_layout(hf_config, self.tp, r) for r in range(self.tp)]
        except ValueError as error:
            raise RolloutError(str(error)) from error
        context = config.context_length or int(hf_config["max_position_embeddings"])
        self._longest = context if devices is not None else min(context, config.max_total_tokens)
        self._push: PushLedger | None = None
        self._is_stale = False
        self._asleep: set[str] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._abort = threading.Event()
        args = server_args(
            config, model_path=model_path, dtype=dtype, on_cuda=devices is not None, seed=seed
        )
        threads = None if num_threads is None else max(1, num_threads // self.tp)
        self._process = EngineProcess(
            args,
            environment=worker_environment(devices, self.tp),
            num_threads=threads if devices is None else None,
            start_timeout_s=config.start_timeout_s,
        )
        atexit.register(self.close)
        self._require_layout()

    # ---- generation

    def generate(
        self, requests: Iterable[GenerationRequest], sampling: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        """See RolloutEngine. At most max_running_requests // num_samples prompts (at least one) run
        at once.
        """
        if self._push is not None or self._is_stale:
            state = (
                "a weight push is open" if self._push is not None else "the last weight push failed"
            )
            raise RolloutError(f"cannot generate: {state}; finish a whole push first")
        if self._asleep:
            raise RolloutError(
                f"cannot generate: asleep ({', '.join(sorted(self._asleep))}); call wake() first"
            )
        if self._running:
            raise RolloutError("cannot generate: another generate() is not finished")
        self._abort.clear()
        return self._generate(iter(requests), sampling)

    def _generate(
        self, source: Iterator[GenerationRequest], sampling: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        manager, process = self._process.manager, self._process
        max_prompts = max(1, self.config.max_running_requests // sampling.num_samples)
        deadline = time.monotonic() + self.config.generate_timeout_s
        has_sent_abort = is_exhausted = False
        try:
            while True:
                while (
                    not is_exhausted
                    and not self._abort.is_set()
                    and len(self._running) < max_prompts
                ):
                    request = next(source, None)
                    if request is None:
                        is_exhausted = True
                        break
                    self._running.add(process.start(self._complete(request, sampling)))
                if not self._running:
                    return
                if self._abort.is_set() and not has_sent_abort:
                    manager.abort_request(abort_all=True)
                    has_sent_abort = True
                for task in process.wait(self._running):
                    self._running.discard(task)
                    yield task.result()
                process.require_alive()
                if time.monotonic() > deadline:
                    limit = self.config.generate_timeout_s
                    raise RolloutError(f"generation was not finished within {limit:g} s")
        finally:
            left, self._running = self._running, set()
            process.drop(left)

    async def _complete(
        self, request: GenerationRequest, sampling: SamplingParams
    ) -> tuple[int, list[Completion]]:
        """All samples of one prompt. SGLang may end a response up to 2 tokens before the context is
        full.
        """
        room = self._longest - sampling.max_new_tokens
        if not 1 <= len(request.prompt_ids) <= room:
            raise RolloutError(
                f"prompt {request.key} has {len(request.prompt_ids)} tokens; with max_new_tokens="
                f"{sampling.max_new_tokens} it must have 1 to {room}"
            )
        shared = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": [*{*self._stop_ids, *sampling.stop_token_ids}],
        }
        n = sampling.num_samples
        try:
            if n > 1 and len(request.prompt_ids) >= _PREFIX_TOKENS:
                await self._send(request.prompt_ids, {**shared, "max_new_tokens": 0})
            if self._abort.is_set():
                return request.key, [self._completion({}) for _ in range(n)]
            seeds = [derive_seed(request.seed, i) for i in range(n)]
            answers = await asyncio.gather(
                *(self._send(request.prompt_ids, {**shared, "sampling_seed": s}) for s in seeds)
            )
        except ValueError as error:
            raise RolloutError(f"SGLang refused prompt {request.key}: {error}") from error
        return request.key, [self._completion(answer) for answer in answers]

    async def _send(self, prompt_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        request = GenerateReqInput(
            input_ids=prompt_ids, sampling_params=sampling, return_logprob=True
        )
        answer = await anext(self._process.manager.generate_request(request, None))
        return dict(answer)

    def _completion(self, answer: dict[str, Any]) -> Completion:
        """From SGLang's answer; an empty one is a request that was aborted before it started."""
        meta = answer.get("meta_info", {})
        ids = list(answer.get("output_ids", []))
        log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        if len(log_probs) != len(ids):
            raise RolloutError(f"SGLang returned {len(ids)} tokens but {len(log_probs)} log-probs")
        reason = (meta.get("finish_reason") or {}).get("type", "abort")
        return Completion(
            response_ids=ids, log_probs=log_probs, finish_reason=_finish_reason(reason),
            weight_version=self.weight_version,
        )  # fmt: skip

    def abort(self) -> None:
        """See RolloutEngine; may be called from another thread. Prompts not yet taken stay in their
        source.
        """
        self._abort.set()

    # ---- weights

    def weight_layout(self, tp_rank: int) -> WeightLayout:
        return self._layouts[tp_rank]

    def begin_update(self) -> None:
        if self._push is not None:
            raise WeightSyncError("a weight push is already open; call end_update first")
        if self._running:
            raise WeightSyncError("generation is running; finish or abort it before a weight push")
        self._session(BeginWeightUpdateReqInput())
        self._is_stale = True
        self._push = PushLedger(self._layouts, self.dtype)

    def update_weights(self, shards: Sequence[dict[str, torch.Tensor | bytes]]) -> None:
        if self._push is None:
            raise WeightSyncError("no weight push is open; call begin_update first")
        if len(shards) != self.tp:
            raise WeightSyncError(f"{len(shards)} shards for an engine of {self.tp} ranks")
        payloads = []
        for rank, shard in enumerate(shards):
            parsed = {k: read_shard(v) if isinstance(v, bytes) else v for k, v in shard.items()}
            self._push.add(rank, parsed)
            payloads.append(_pack(parsed))
        for report in self._call_loader(INSTALL, payloads):
            if not report["ok"]:
                raise WeightSyncError(f"the engine did not take a parameter: {report['error']}")

    def end_update(self, version: int) -> None:
        if self._push is None:
            raise WeightSyncError("no weight push is open; call begin_update first")
        push, self._push = self._push, None
        self._session(EndWeightUpdateReqInput())
        push.require_complete()
        flushed = self._run(self._process.manager.flush_cache(), "flushing its cache")
        if not flushed.success:
            raise WeightSyncError("SGLang did not drop its cached prefixes after the push")
        self._is_stale = False
        self.weight_version = version

    def checksums(self) -> list[dict[str, str]]:
        return [dict(r["digests"]) for r in self._reports(REPORT_DIGESTS)]

    @staticmethod
    def digest(tensor: torch.Tensor) -> str:
        """What `checksums` computes of each parameter."""
        return shards.digest(tensor)

    @staticmethod
    def export_shard(tensor: torch.Tensor) -> torch.Tensor | bytes:
        if tensor.is_cuda:
            # handles name the device by UUID, not by a process's own number
            monkey_patch_torch_reductions()
        return export_shard(tensor)

    def _reports(self, loader: str) -> list[dict[str, Any]]:
        """What `loader` says on each rank, in a session of its own unless a push is open."""
        has_own_session = self._push is None
        if has_own_session:
            self._session(BeginWeightUpdateReqInput())
        reports = self._call_loader(loader, [_pack({})] * self.tp)
        if has_own_session:
            self._session(EndWeightUpdateReqInput())
        for rank, report in enumerate(reports):
            if not report["ok"]:
                raise WeightSyncError(f"engine rank {rank}: {report['error']}")
        return reports

    def _call_loader(self, loader: str, payloads: list[bytes]) -> list[dict[str, Any]]:
        """Run a loader of sglang_worker on every rank and read the ranks' reports."""
        paths = [report_path(self._process.folder, rank) for rank in range(self.tp)]
        for path in paths:
            path.unlink(missing_ok=True)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=loader, flush_cache=False
        )
        self._session(request)
        return [json.loads(path.read_text()) for path in paths]

    def _session(self, request: Any) -> None:
        """One call of SGLang's weight-update API. Raises WeightSyncError with SGLang's message."""
        manager = self._process.manager
        call = {
            BeginWeightUpdateReqInput: manager.begin_weight_update,
            EndWeightUpdateReqInput: manager.end_weight_update,
            UpdateWeightsFromTensorReqInput: manager.update_weights_from_tensor,
        }[type(request)]
        is_ok, message = self._run(call(request, None), "a weight update")
        if not is_ok:
            raise WeightSyncError(f"SGLang refused {call.__name__}: {message}")

    def _run(self, coroutine: Any, what: str) -> Any:
        return self._process.run(coroutine, what=what, timeout_s=_CONTROL_TIMEOUT_S)

    def _require_layout(self) -> None:
        """Raise RolloutError, and close, unless the ranks hold exactly what the layouts say."""
        try:
            for rank, report in enumerate(self._reports(REPORT_SHAPES)):
                held = {name: tuple(shape) for name, (shape, _) in report["parameters"].items()}
                wanted = self._layouts[rank].parameters
                wrong = [n for n in sorted({*held, *wanted}) if held.get(n) != wanted.get(n)]
                if wrong:
                    n = wrong[0]
                    raise RolloutError(
                        f"SGLang's rank {rank} holds other parameters than megarl's layout: {n} is "
                        f"{held.get(n)}, expected {wanted.get(n)} ({len(wrong)} differ)"
                    )
        except Exception:
            self.close()
            raise

    # ---- memory and end

    def sleep(self) -> None:
        tags = [tag for tag in _MEMORY_TAGS if tag not in self._asleep]
        if tags:
            request = ReleaseMemoryOccupationReqInput(tags=tags)
            self._run(self._process.manager.release_memory_occupation(request, None), "sleep")
            self._asleep.update(tags)

    def wake(self, tags: Sequence[str] = _MEMORY_TAGS) -> None:
        tags = [tag for tag in tags if tag in self._asleep]
        if tags:
            request = ResumeMemoryOccupationReqInput(tags=tags)
            self._run(self._process.manager.resume_memory_occupation(request, None), "wake")
            self._asleep.difference_update(tags)

    def close(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.close()
        atexit.unregister(self.close)


def _finish_reason(name: str) -> FinishReason:
    if name in ("stop", "length", "abort"):
        return name  # type: ignore[return-value]
    raise RolloutError(f"SGLang ended a request with an unknown reason {name!r}")


def _pack(shard: dict[str, torch.Tensor | ExportedShard]) -> bytes:
    """The message for one engine rank: handles to its parameters, no parameter data."""
    handles = [
        (name, (v if isinstance(v, ExportedShard) else read_shard(_export(v))).payload)
        for name, v in shard.items()
    ]
    packed = torch.frombuffer(bytearray(pickle.dumps(handles)), dtype=torch.uint8)
    with shards.file_system_sharing():
        return bytes(MultiprocessingSerializer.serialize([("shards", packed)]))


def _export(tensor: torch.Tensor) -> bytes:
    exported = SGLangEngine.export_shard(tensor)
    assert isinstance(exported, bytes)
    return exported
