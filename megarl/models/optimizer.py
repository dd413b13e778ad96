"""AdamW under megatron's DistributedOptimizer; the learning rate is a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, isfinite, pi

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.config.errors import ConfigError
from megarl.config.schema import OptimConfig

__all__ = ["Optimizer", "StepStats", "lr_at"]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One optimizer step; the same on every rank of the role."""

    grad_norm: float  # global, before clipping
    lr: float
    is_finite: bool  # False: the gradient is not finite and no weight was changed


def lr_at(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Learning rate of update `step` (from 0) of `num_steps`.

    Warm-up rises linearly and reaches the peak at step num_warmup_steps - 1, so the first update is
    not wasted. The decay starts after it and would reach min_lr at step num_steps.
    """
    if step < optim.num_warmup_steps:
        return optim.lr * (step + 1) / optim.num_warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.num_warmup_steps) / max(1, num_steps - optim.num_warmup_steps)
    progress = min(progress, 1.0)
    share = 1 - progress if optim.schedule == "linear" else (1 + cos(pi * progress)) / 2
    return optim.min_lr + share * (optim.lr - optim.min_lr)


class Optimizer:
    """Optimizer of one role. Stepping is collective over the role, building over the world."""

    def __init__(
        self,
        optim: OptimConfig,
        ddp: DistributedDataParallel,
        pgs: ProcessGroupCollection,
        *,
        num_steps: int,
    ) -> None:
        """
        Args:
            optim: settings.
            ddp: the wrapped model; megatron's optimizer takes its gradient buffers.
            pgs: groups of the role.
            num_steps: number of updates that the schedule spans; > 0 unless it is constant.
        """
        if optim.schedule != "constant" and num_steps < 1:
            raise ConfigError(
                f"optim.schedule={optim.schedule!r} needs the number of updates; "
                "use optim.schedule=constant"
            )
        config = ddp.config
        settings = OptimizerConfig(
            optimizer="adam", lr=optim.lr, min_lr=optim.min_lr, weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1, adam_beta2=optim.beta2, adam_eps=optim.eps,
            clip_grad=optim.clip_grad, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )  # fmt: skip
        # Only the standard overrides take norms and biases out of the weight decay.
        self._inner = get_megatron_optimizer(
            settings, [ddp], config_overrides=get_standard_config_overrides(settings),
            use_gloo_process_groups=False, pg_collection=pgs,
        )  # fmt: skip
        self._optim, self._num_steps, self._step = optim, num_steps, 0

    def zero_grad(self) -> None:
        """Drop the gradients of the main parameters."""
        self._inner.zero_grad()

    def step(self) -> StepStats:
        """Clip, update the weights, gather them over dp. A non-finite gradient changes nothing."""
        lr = lr_at(self._step, self._optim, self._num_steps)
        for group in self._inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._optim.weight_decay * group["wd_mult"]
        self._inner.prepare_grads()
        norm = float(self._inner.get_grad_norm())
        if not isfinite(norm):  # reduced over the whole role: every rank returns here, or none
            return StepStats(grad_norm=norm, lr=lr, is_finite=False)
        for part in self._inner.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self._optim.clip_grad, total_norm=norm
                )
        self._inner.step_with_ready_grads()
        self._step += 1
        return StepStats(grad_norm=norm, lr=lr, is_finite=True)
