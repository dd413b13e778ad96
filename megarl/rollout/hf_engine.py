"""HFEngine: the same contract on an in-process transformers model, for debugging and as a second
opinion.

One process, no tensor parallelism; prompts are generated in left-padded batches with a KV cache.
Slow and simple: what it returns is what the model's forward pass says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from transformers import AutoModelForCausalLM

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
from megarl.rollout.sglang_layout import hf_weight_layout
from megarl.rollout.shards import PushLedger
from megarl.types import FinishReason, WeightLayout

__all__ = ["HFEngine"]


@dataclass
class _Row:
    """One sample being generated."""

    key: int
    prompt_ids: list[int]
    generator: torch.Generator
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class HFEngine(RolloutEngine):
    """See RolloutEngine. `seed` of a request makes its draws reproducible whatever else is in the
    batch.
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
            devices: one CUDA device; None: CPU.
            num_threads, seed: not used: it runs in this process, and every request has a seed.

        Raises:
            RolloutError: the folder holds no model of a supported family.
        """
        require_weights(model_path)
        hf_config = read_hf_config(model_path)
        self.config = config
        self.dtype = getattr(torch, dtype)
        self.device = torch.device("cuda", devices[0]) if devices else torch.device("cpu")
        try:
            self._layout = hf_weight_layout(hf_config)
        except ValueError as error:
            raise RolloutError(str(error)) from error
        self._context = config.context_length or int(hf_config["max_position_embeddings"])
        self._stop_ids = end_of_sequence_ids(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=self.dtype)
        self._model: torch.nn.Module | None = model.to(self.device).eval()
        self._push: PushLedger | None = None
        self._is_stale = False
        self._abort = threading.Event()

    @property
    def model(self) -> torch.nn.Module:
        if self._model is None:
            raise RolloutError("the engine is closed")
        return self._model

    # ---- generation

    def generate(
        self, requests: Iterable[GenerationRequest], sampling: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        """See RolloutEngine. Takes max_running_requests // num_samples prompts (at least one) at a
        time.
        """
        if self._push is not None or self._is_stale:
            state = (
                "a weight push is open" if self._push is not None else "the last weight push failed"
            )
            raise RolloutError(f"cannot generate: {state}; finish a whole push first")
        self._abort.clear()
        return self._generate(iter(requests), sampling)

    def _generate(
        self, source: Iterator[GenerationRequest], sampling: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        max_prompts = max(1, self.config.max_running_requests // sampling.num_samples)
        deadline = time.monotonic() + self.config.generate_timeout_s
        while not self._abort.is_set():
            batch = list(islice(source, max_prompts))
            if not batch:
                return
            rows = [row for request in batch for row in self._rows(request, sampling)]
            self._run(rows, sampling, deadline)
            for i, request in enumerate(batch):
                mine = rows[i * sampling.num_samples : (i + 1) * sampling.num_samples]
                yield request.key, [self._completion(row) for row in mine]

    def _rows(self, request: GenerationRequest, sampling: SamplingParams) -> list[_Row]:
        room = self._context - sampling.max_new_tokens
        if not 1 <= len(request.prompt_ids) <= room:
            raise RolloutError(
                f"prompt {request.key} has {len(request.prompt_ids)} tokens; with max_new_tokens="
                f"{sampling.max_new_tokens} it must have 1 to {room}"
            )
        generators = [torch.Generator(self.device) for _ in range(sampling.num_samples)]
        for i, generator in enumerate(generators):
            generator.manual_seed(derive_seed(request.seed, i))
        return [_Row(request.key, request.prompt_ids, g) for g in generators]

    @torch.no_grad()
    def _run(self, rows: list[_Row], sampling: SamplingParams, deadline: float) -> None:
        """Generate all rows to their end; rows that are done ride along until the last one is."""
        stop_ids = {*self._stop_ids, *sampling.stop_token_ids}
        width = max(len(row.prompt_ids) for row in rows)
        padding = [width - len(row.prompt_ids) for row in rows]
        ids = [[0] * pad + row.prompt_ids for pad, row in zip(padding, rows, strict=True)]
        tokens = torch.tensor(ids, device=self.device)  # [B, width]
        mask = (
            torch.arange(width, device=self.device)
            >= torch.tensor(padding, device=self.device)[:, None]
        )
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        mask, cache = mask.long(), None
        while True:
            output = self.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions,
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            cache = output.past_key_values
            drawn = self._draw(rows, output.logits[:, -1].float(), sampling)
            for row, token in zip(rows, drawn, strict=True):
                if row.finish_reason is None:
                    row.finish_reason = self._end(row, token, stop_ids, sampling.max_new_tokens)
            if all(row.finish_reason is not None for row in rows):
                return
            if time.monotonic() > deadline:
                limit = self.config.generate_timeout_s
                raise RolloutError(f"generation was not finished within {limit:g} s")
            tokens = torch.tensor(drawn, device=self.device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _end(
        self, row: _Row, token: int, stop_ids: set[int], max_new_tokens: int
    ) -> FinishReason | None:
        if token in stop_ids:
            return "stop"
        if len(row.response_ids) >= max_new_tokens:
            return "length"
        return "abort" if self._abort.is_set() else None

    def _draw(self, rows: list[_Row], logits: torch.Tensor, sampling: SamplingParams) -> list[int]:
        """Draw a token for each row and record it with its log-prob on those that run.

        Args:
            logits: [B, V] float32.
        """
        is_greedy = sampling.temperature == 0
        log_probs = (logits if is_greedy else logits / sampling.temperature).log_softmax(-1)
        if is_greedy:
            chosen = logits.argmax(-1).tolist()
        else:
            weights = _restrict(log_probs.exp(), sampling.top_p, sampling.top_k)
            chosen = [
                int(torch.multinomial(w, 1, generator=row.generator))
                if row.finish_reason is None
                else 0
                for w, row in zip(weights, rows, strict=True)
            ]
        for i, row in enumerate(rows):
            if row.finish_reason is None:
                row.response_ids.append(chosen[i])
                row.log_probs.append(float(log_probs[i, chosen[i]]))
        return chosen

    def _completion(self, row: _Row) -> Completion:
        assert row.finish_reason is not None, row.key
        return Completion(
            response_ids=row.response_ids, log_probs=row.log_probs, finish_reason=row.finish_reason,
            weight_version=self.weight_version,
        )  # fmt: skip

    def abort(self) -> None:
        """See RolloutEngine; may be called from another thread. Prompts not yet taken stay in their
        source.
        """
        self._abort.set()

    # ---- weights

    def weight_layout(self, tp_rank: int) -> WeightLayout:
        assert tp_rank == 0, tp_rank
        return self._layout

    def begin_update(self) -> None:
        if self._push is not None:
            raise WeightSyncError("a weight push is already open; call end_update first")
        self._push, self._is_stale = PushLedger([self._layout], self.dtype), True

    @torch.no_grad()
    def update_weights(self, shards: Sequence[dict[str, torch.Tensor | bytes]]) -> None:
        if self._push is None:
            raise WeightSyncError("no weight push is open; call begin_update first")
        if len(shards) != 1 or any(isinstance(v, bytes) for v in shards[0].values()):
            raise WeightSyncError(
                "the hf engine is one rank of this process: give it one shard of tensors"
            )
        shard = {name: v for name, v in shards[0].items() if isinstance(v, torch.Tensor)}
        self._push.add(0, shard)
        parameters = dict(self.model.named_parameters())
        for name, value in shard.items():
            parameters[name].copy_(value)

    def end_update(self, version: int) -> None:
        if self._push is None:
            raise WeightSyncError("no weight push is open; call begin_update first")
        push, self._push = self._push, None
        push.require_complete()
        self._is_stale, self.weight_version = False, version

    def checksums(self) -> list[dict[str, str]]:
        return [{name: shards.digest(p) for name, p in self.model.named_parameters()}]

    @staticmethod
    def digest(tensor: torch.Tensor) -> str:
        """What `checksums` computes of each parameter."""
        return shards.digest(tensor)

    @staticmethod
    def export_shard(tensor: torch.Tensor) -> torch.Tensor | bytes:
        return tensor.detach()  # it never leaves this process

    # ---- memory and end

    def sleep(self) -> None:
        """Nothing to release: the model is the only memory and training may need it any time."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See sleep."""

    def close(self) -> None:
        self._model = None


def _restrict(probs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Set to 0 what top-k and top-p leave out; both look at the same unfiltered probabilities, as
    in SGLang.

    Args:
        probs: [B, V].
        top_p: keep the likeliest tokens until their sum reaches it.
        top_k: keep that many; -1: all.
    """
    if top_p >= 1.0 and top_k == -1:
        return probs
    ordered, index = probs.sort(dim=-1, descending=True)
    drop = (ordered.cumsum(-1) - ordered) > top_p
    if top_k != -1:
        drop[:, top_k:] = True
    return torch.zeros_like(probs).scatter_(-1, index, ordered.masked_fill(drop, 0.0))
