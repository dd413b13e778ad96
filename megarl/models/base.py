"""MegatronModel: one role's weights in the training layout, pipeline schedule and optimizer.

The one place where log-probs are shifted to the tokens they score. Losses arrive already divided by
counts of the whole minibatch, so gradients are plain sums over micro-batches and data-parallel
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.config.schema import ModelConfig, OptimConfig
from megarl.models.builder import build_gpt, process_groups
from megarl.models.families import model_spec
from megarl.models.heads import HeadRequest, install_log_prob_head
from megarl.models.hf_weights import load_hf_weights, save_hf_weights
from megarl.models.optimizer import Optimizer, StepStats
from megarl.models.weight_layout import weight_layout
from megarl.parallel import ParallelGroups, all_agree
from megarl.parallel.dims import Coordinate
from megarl.types import TokenScores, TrainBatch, WeightLayout

__all__ = ["LossFn", "MegatronModel"]

LossFn = Callable[[TokenScores, TrainBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class MegatronModel:
    """One role's model. Every method that is not a plain getter is collective over the role."""

    def __init__(
        self,
        hf_config: dict[str, Any],
        model: ModelConfig,
        groups: ParallelGroups,
        gpt: GPTModel,
        optim: OptimConfig | None,
        *,
        device: torch.device,
        num_steps: int,
    ) -> None:
        """Use `build`."""
        self.hf_config, self.groups, self.dims, self.device = hf_config, groups, groups.dims, device
        self.dtype: torch.dtype = gpt.config.params_dtype
        self.path = model.path
        self.force_all_reduce = (
            False  # True: every dp rank keeps whole gradients instead of its shard
        )
        self._gpt = gpt
        self._pgs: ProcessGroupCollection = process_groups(groups)
        self._head = install_log_prob_head(gpt, model_spec(hf_config).vocab_size)
        self._ddp: DistributedDataParallel | None = None
        self._optimizer: Optimizer | None = None
        self._p2p = P2PCommunicator(groups.pp, gpt.config) if self.dims.pp > 1 else None
        if optim is None:
            gpt.requires_grad_(False)
            return
        gpt.config.finalize_model_grads_func = _sum_gradients
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self._ddp = DistributedDataParallel(gpt.config, settings, gpt, pg_collection=self._pgs)
        self._optimizer = Optimizer(optim, self._ddp, self._pgs, num_steps=num_steps)

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        groups: ParallelGroups,
        *,
        device: torch.device,
        trainable: OptimConfig | None,
        num_steps: int = 0,
        seed: int = 0,
    ) -> MegatronModel:
        """Build the role's model and load its weights.

        Args:
            model: Hugging Face folder, dtype and recomputation.
            groups: groups of the role; their dims are the layout.
            device: where weights and batches live.
            trainable: optimizer settings; None: frozen, without gradients, DDP and optimizer. With
                an optimizer, every rank of the job must build (megatron gathers over the world
                here).
            num_steps: optimizer updates that the learning-rate schedule spans.
            seed: of megatron's random state; nothing random is used as there is no dropout.

        Raises:
            ConfigError: the model is not supported or does not divide over the layout.
            FileNotFoundError, ValueError: the folder's weights do not fit its config.json.
            PeerFailure: loading failed on another rank.
        """
        folder = Path(model.path)
        hf_config = json.loads((folder / "config.json").read_text())
        gpt = build_gpt(hf_config, model, groups, device=device, seed=seed)
        layout = weight_layout(hf_config, groups.dims, groups.dims.rank(groups.coordinate))
        parameters = dict(gpt.named_parameters())
        all_agree(
            "loading weights", lambda: load_hf_weights(folder, layout, parameters), groups.role
        )
        return cls(hf_config, model, groups, gpt, trainable, device=device, num_steps=num_steps)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under the names of `weight_layout().parameters`."""
        return {name: parameter.data for name, parameter in self._gpt.named_parameters()}

    def weight_layout(self) -> WeightLayout:
        """What this rank holds of the Hugging Face checkpoint."""
        return weight_layout(self.hf_config, self.dims, self.dims.rank(self.groups.coordinate))

    def score(
        self,
        batches: Sequence[TrainBatch],
        *,
        temperature: float,
        with_entropy: bool = False,
        only_trained: bool = False,
    ) -> list[TokenScores]:
        """Log-probs (and entropy) of every token, without gradients.

        Args:
            batches: micro-batches of this dp rank, at least one; the same on its tp and pp ranks.
            temperature: divides the logits, > 0.
            with_entropy: False leaves the entropy 0 and saves its cost.
            only_trained: score tokens where response_mask is not 0; the others get 0.

        Returns:
            One TokenScores per batch, the same on every tp and pp rank.
        """
        self._gpt.eval()
        with torch.no_grad():
            scores = self._run(
                self._gpt, batches, None, temperature, with_entropy,
                forward_only=True, only_trained=only_trained,
            )  # fmt: skip
        self._gpt.train()
        lengths = [b.num_tokens for b in batches]
        flat = torch.empty(2, sum(lengths), device=self.device)
        if self.groups.is_last_stage:
            for row, field in enumerate(("log_probs", "entropy")):
                torch.cat([getattr(s, field) for s in scores], out=flat[row])
        if self.dims.pp > 1:
            dist.broadcast(flat, src=self._last_stage_rank, group=self.groups.pp)
        return [
            TokenScores(log_probs=part[0], entropy=part[1])
            for part in torch.split(flat, lengths, dim=1)
        ]

    def forward_backward(
        self,
        batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        *,
        temperature: float,
        with_entropy: bool = True,
    ) -> list[dict[str, torch.Tensor]]:
        """Set the gradient to the sum over micro-batches and dp ranks of d loss / d weights.

        Only tokens where response_mask is not 0 are scored; the others have log-prob and entropy 0.

        Args:
            batches: micro-batches of this dp rank, at least one; the same number on every dp rank.
            loss_fn: (scores, batch) -> (scalar loss, small tensors to hand back). The loss is
                already divided by what it should be divided by: nothing is averaged here. Runs on
                the last stage only.
            temperature: divides the logits, > 0.
            with_entropy: False leaves scores.entropy 0 and saves its cost.

        Returns:
            The second value of `loss_fn` per micro-batch of this dp rank, detached, the same on
            every tp and pp rank.
        """
        assert self._ddp is not None, "the model was built frozen"
        assert self._optimizer is not None
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        results = self._run(
            self._ddp,
            batches,
            loss_fn,
            temperature,
            with_entropy,
            forward_only=False,
            only_trained=True,
        )
        if self.dims.pp == 1:
            return results
        carried = [[{k: v.cpu() for k, v in r.items()} for r in results]]
        dist.broadcast_object_list(carried, src=self._last_stage_rank, group=self.groups.pp)
        return [{k: v.to(self.device) for k, v in r.items()} for r in carried[0]]

    def step(self) -> StepStats:
        """Clip the gradient and update the weights; a non-finite gradient leaves them untouched."""
        assert self._optimizer is not None, "the model was built frozen"
        return self._optimizer.step()

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: these weights, config and tokenizer of `model.path`."""
        dims = self.dims
        replica = [
            dims.rank(Coordinate(tp=tp, cp=0, dp=0, pp=pp))
            for pp in range(dims.pp)
            for tp in range(dims.tp)
        ]
        layouts = {rank: weight_layout(self.hf_config, dims, rank) for rank in replica}
        save_hf_weights(folder, self.path, layouts, self.named_parameters(), self.groups)

    @property
    def _last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.groups.pp)[-1]

    def _run(
        self,
        module: torch.nn.Module,
        batches: Sequence[TrainBatch],
        loss_fn: LossFn | None,
        temperature: float,
        with_entropy: bool,
        *,
        forward_only: bool,
        only_trained: bool,
    ) -> list[Any]:
        """Run the schedule; on the last stage, scores or loss_fn's second value per micro-batch."""
        if not batches:
            raise ValueError("at least one micro-batch is needed on every data-parallel rank")
        # the schedule sums numbers of tokens; nothing here uses them
        no_tokens = torch.zeros((), dtype=torch.int, device=self.device)

        def forward_step(
            batches: Iterator[TrainBatch], module: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            batch = next(batches).to(self.device)
            output = self._forward(module, batch, temperature, with_entropy, only_trained)

            def reduce(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                scores = _shift(output[0], batch.cu_seqlens)
                if loss_fn is None:
                    return output, no_tokens, scores
                loss, values = loss_fn(scores, batch)
                # a loss without graph (all tokens masked) must still reach every parameter's hook
                loss = loss if loss.requires_grad else loss + 0.0 * output.sum()
                return loss, no_tokens, {k: v.detach() for k, v in values.items()}

            return output, reduce

        schedule = get_forward_backward_func(pp_size=self.dims.pp, vp_size=None)
        results: list[Any] = schedule(
            forward_step_func=forward_step, data_iterator=iter(batches), model=module,
            num_microbatches=len(batches), forward_only=forward_only,
            seq_length=1, micro_batch_size=1,  # both unused: shapes travel with the activations
            p2p_communicator=self._p2p, pg_collection=self._pgs,
            force_all_reduce=self.force_all_reduce,
        )  # fmt: skip
        return results

    def _forward(
        self,
        module: torch.nn.Module,
        batch: TrainBatch,
        temperature: float,
        with_entropy: bool,
        only_trained: bool,
    ) -> torch.Tensor:
        """[1, T, 2] scores of the next token on the last stage, hidden states on others."""
        tp = self.dims.tp
        if self.dims.sequence_parallel and batch.num_tokens % tp:
            raise ValueError(
                f"sequence parallelism splits T={batch.num_tokens} over tp={tp}; "
                "pad the batch with a segment"
            )
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=batch.cu_seqlens, cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen, max_seqlen_kv=batch.max_seqlen,
        )  # fmt: skip
        if self._head is not None:
            # Position t predicts token t + 1. The last token of a segment predicts the next
            # segment's first; that score is dropped by _shift.
            trained = batch.response_mask.roll(-1).nonzero().squeeze(-1)
            self._head.request = HeadRequest(
                targets=batch.input_ids.roll(-1), positions=trained if only_trained else None,
                temperature=temperature, with_entropy=with_entropy,
            )  # fmt: skip
        output: torch.Tensor = module(
            batch.input_ids[None], batch.position_ids[None], None, packed_seq_params=packed
        )
        if self._head is not None:
            self._head.request = None
        return output


def _shift(output: torch.Tensor, cu_seqlens: torch.Tensor) -> TokenScores:
    """Move scores from the position that predicts to the token that is predicted.

    Args:
        output: [T, 2], log-prob and entropy of the prediction made at each position.
        cu_seqlens: [S+1] int32.

    Returns:
        TokenScores; the first token of each segment has 0, and no gradient comes from its place.
    """
    is_first = torch.zeros(output.size(0) + 1, dtype=torch.bool, device=output.device)
    is_first[cu_seqlens.long()] = True  # one longer: cu_seqlens ends at T
    shifted = output.roll(1, dims=0).masked_fill(is_first[:-1, None], 0.0)
    return TokenScores(log_probs=shifted[:, 0], entropy=shifted[:, 1])


def _sum_gradients(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    """finalize_model_grads without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)
