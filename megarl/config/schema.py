"""Every setting of megarl, its default, unit and valid range. The only place that has defaults.

The string under a field is its reference documentation. Rules on one section stand in its
__post_init__; rules across sections in config/validate.py. Importing this module imports neither
torch nor anything heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.errors import require, require_positive, require_range

__all__ = [
    "AlgorithmConfig", "DataConfig", "ModelConfig", "OptimConfig", "ParallelConfig", "RewardConfig",
    "RolloutConfig", "SftConfig", "SftTrainerConfig", "TrainConfig", "TrainerConfig",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The actor: a Hugging Face folder of a supported family."""

    path: str = ""
    """Folder with config.json, safetensors weights and a tokenizer. Required."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations; the optimizer keeps float32 main weights."""
    recompute: Literal["none", "full"] = "none"
    """Activation recomputation in the backward pass: full trades a second forward for memory."""
    chat_template: str | None = None
    """Path of a Jinja chat template; needed when the tokenizer has none."""

    def __post_init__(self) -> None:
        require(
            bool(self.path), "model.path", self.path, "is required", "give a Hugging Face folder"
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the actor is split for training: tp * cp * pp * dp = number of ranks."""

    tp: int = 1
    """Tensor parallel size, >= 1; divides attention heads, KV heads and the MLP width."""
    pp: int = 1
    """Pipeline parallel size, 1 .. number of layers."""
    cp: int = 1
    """Context parallel size. Only 1 is implemented for packed sequences."""
    dp: int | None = None
    """Data parallel size; None: number of ranks / (tp * pp * cp)."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tp ranks along the sequence (needs tp > 1)."""
    timeout_s: float = 600.0
    """Limit of every collective, seconds, > 0. A rank that is later stops the run."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp"):
            require_positive(f"parallel.{name}", getattr(self, name))
        if self.dp is not None:
            require_positive("parallel.dp", self.dp)
        require_positive("parallel.timeout_s", self.timeout_s)
        require(
            not self.sequence_parallel or self.tp > 1, "parallel.sequence_parallel", True,
            "needs parallel.tp > 1", "set parallel.tp=2 or parallel.sequence_parallel=false",
        )  # fmt: skip
        require(
            self.cp == 1,
            "parallel.cp",
            self.cp,
            "is not implemented for packed sequences",
            "use parallel.cp=1",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation: engine, its layout and the sampling."""

    engine: Literal["sglang", "hf"] = "sglang"
    """sglang: on CPU and GPU. hf: in-process Hugging Face generate, for debugging (tp=1 only)."""
    tp: int = 1
    """Tensor parallel size of one engine replica; number of replicas = number of ranks / tp."""
    num_samples: int = 8
    """Responses per prompt (G), >= 1."""
    max_new_tokens: int = 256
    """Longest response, tokens, >= 1."""
    temperature: float = 1.0
    """Sampling temperature, > 0. Log-probs of engine and trainer are both taken at it."""
    top_p: float = 1.0
    """Nucleus sampling, in (0, 1]."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1: all."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, besides the model's end-of-sequence ids."""
    seed: int = 0
    """Seed of the sampling; replica r of step s draws from a stream of its own."""
    max_running_requests: int = 64
    """Responses generated at once by one replica, >= 1."""
    max_total_tokens: int = 32768
    """KV cache of one replica on CPU, tokens, >= longest prompt + response; CUDA: memory_frac."""
    memory_frac: float = 0.6
    """Share of GPU memory for weights and KV cache of the engine (CUDA only), in (0, 1)."""
    context_length: int | None = None
    """Longest prompt + response the engine accepts; None: the model's own."""
    start_timeout_s: float = 300.0
    """Limit for an engine to start, seconds."""
    generate_timeout_s: float = 1800.0
    """Limit for one step's generation on one replica, seconds."""
    max_log_prob_diff: float | None = None
    """Stop when a token's |engine - trainer log-prob| is above; None: 1e-3 in float32, else off."""

    def __post_init__(self) -> None:
        for name in (
            "tp",
            "num_samples",
            "max_new_tokens",
            "max_running_requests",
            "max_total_tokens",
            "start_timeout_s",
            "generate_timeout_s",
            "temperature",
        ):
            require_positive(f"rollout.{name}", getattr(self, name))
        require_range("rollout.top_p", self.top_p, 0.0, 1.0, open_low=True)
        require_range("rollout.memory_frac", self.memory_frac, 0.0, 1.0, open_low=True)
        require(
            self.top_k == -1 or self.top_k >= 1, "rollout.top_k", self.top_k, "must be -1 or >= 1",
            "use -1 to sample among all tokens",
        )  # fmt: skip
        require(
            self.engine == "sglang" or self.tp == 1, "rollout.tp", self.tp,
            "needs rollout.engine=sglang: the hf engine is one process", "use rollout.tp=1",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompt files in verl's Parquet schema: data_source, prompt, reward_model, extra_info."""

    train_files: list[str] = field(default_factory=list)
    """Parquet files to train on. Required."""
    val_files: list[str] = field(default_factory=list)
    """Held-out Parquet files for evaluation; empty: no evaluation."""
    max_prompt_tokens: int = 1024
    """Longest prompt, tokens, >= 1."""
    overlong_prompt: Literal["drop", "error"] = "drop"
    """What to do with a longer one: drop it (counted) or stop."""
    shuffle: bool = True
    """Shuffle every epoch, from data.seed."""
    seed: int = 0
    """Seed of the order."""

    def __post_init__(self) -> None:
        require(bool(self.train_files), "data.train_files", self.train_files, "is required",
                "give one or more Parquet files; `megarl prepare` writes them")  # fmt: skip
        require_positive("data.max_prompt_tokens", self.max_prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Which reward scores a response."""

    name: str = "number"
    """A name from megarl.rewards (number: the answer's number equals ground_truth)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that reward, e.g. {method: strict} for number: only what follows #### counts."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages, policy loss, KL and how they are summed."""

    advantage: str = "grpo"
    """Advantage estimator by name (megarl.algorithms.outcome_advantages, docs/numerics.md)."""
    normalize_by_std: bool = True
    """grpo, grpo_passk: divide by the group's standard deviation; false with grpo is Dr.GRPO."""
    policy_loss: str = "ppo_clip"
    """Policy loss by name (megarl.algorithms.policy_losses, docs/numerics.md)."""
    clip_low: float = 0.2
    """Ratio is clipped at 1 - clip_low, in [0, 1). geo_mean: on log-ratio; dppo: on distance."""
    clip_high: float = 0.2
    """Ratio is clipped at 1 + clip_high, >= 0. geo_mean: on log-ratio; dppo: on distance."""
    clip_dual: float = 3.0
    """ppo_clip: loss at most -clip_dual * advantage where that is < 0; dppo: largest ratio; > 1."""
    cov_frac: float = 2e-4
    """clip_cov, kl_cov: share of the minibatch's tokens that is held back, in (0, 1]."""
    cov_low: float = 1.0
    """clip_cov: tokens are drawn among those of covariance above."""
    cov_high: float = 5.0
    """clip_cov: tokens are drawn among those of covariance below, >= cov_low."""
    cov_kl_coef: float = 1.0
    """kl_cov: weight of |log-ratio| on the tokens held back, >= 0."""
    sapo_tau_pos: float = 1.0
    """sapo: steepness of the gate where the advantage is positive, > 0."""
    sapo_tau_neg: float = 1.05
    """sapo: steepness of the gate elsewhere, > 0."""
    dro_beta: float = 0.1
    """dro: weight of the squared log-ratio, > 0."""
    loss_aggregation: Literal[
        "token_mean",
        "token_sum",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "seq_mean_token_mean",
    ] = "token_mean"
    """How token losses become one number; denominators are counted over the whole minibatch."""
    kl_coef: float = 0.0
    """Weight of the KL to the frozen reference in the loss, >= 0; 0: no reference is loaded."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html); + has the gradient of k2."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, >= 0."""
    num_epochs: int = 1
    """Passes over the samples of a step, >= 1."""
    num_minibatches: int = 1
    """Optimizer updates per pass; divides trainer.prompts_per_step."""

    def __post_init__(self) -> None:
        require_range("algorithm.clip_low", self.clip_low, 0.0, 1.0)
        require_range("algorithm.cov_frac", self.cov_frac, 0.0, 1.0, open_low=True)
        for name in ("clip_high", "kl_coef", "entropy_coef", "cov_kl_coef"):
            require(
                getattr(self, name) >= 0,
                f"algorithm.{name}",
                getattr(self, name),
                "must be >= 0",
                "use 0 or more",
            )
        require(
            self.clip_dual > 1, "algorithm.clip_dual", self.clip_dual, "must be > 1", "3.0 is usual"
        )
        require(
            self.cov_low <= self.cov_high, "algorithm.cov_low", self.cov_low,
            f"must be <= algorithm.cov_high={self.cov_high}", "1.0 and 5.0 are usual",
        )  # fmt: skip
        for name in ("num_epochs", "num_minibatches", "sapo_tau_pos", "sapo_tau_neg", "dro_beta"):
            require_positive(f"algorithm.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW under megatron's DistributedOptimizer."""

    lr: float = 1e-6
    """Peak learning rate, > 0."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay, 0 .. lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    num_warmup_steps: int = 0
    """Optimizer updates of linear warm-up, >= 0."""
    weight_decay: float = 0.0
    """AdamW weight decay of matrices (norms and biases have none), >= 0."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    beta2: float = 0.999
    """Decay of the second moment, in [0, 1)."""
    eps: float = 1e-8
    """Adam epsilon, > 0."""
    clip_grad: float = 1.0
    """Largest global gradient norm, > 0."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip_grad"):
            require_positive(f"optim.{name}", getattr(self, name))
        require_range("optim.min_lr", self.min_lr, 0.0, self.lr)
        for name in ("beta1", "beta2"):
            require_range(f"optim.{name}", getattr(self, name), 0.0, 1.0)
        for name in ("num_warmup_steps", "weight_decay"):
            require(
                getattr(self, name) >= 0,
                f"optim.{name}",
                getattr(self, name),
                "must be >= 0",
                "use 0 or more",
            )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop: how long, how much per step, where the results go."""

    output_dir: str = ""
    """Run directory; must be new or empty. Required."""
    num_steps: int = 100
    """Steps (generate, score, update), >= 1."""
    prompts_per_step: int = 8
    """Prompts per step (P), >= 1; a step trains on P * rollout.num_samples responses."""
    max_tokens_per_microbatch: int = 4096
    """Packed tokens of a micro-batch; >= longest prompt + response."""
    eval_every: int = 0
    """Steps between greedy evaluations on data.val_files; 0: only at the start and the end."""
    num_dump_samples: int = 4
    """Samples written to samples.jsonl per step, >= 0."""
    save_final: bool = True
    """Export the trained weights as a Hugging Face folder, output_dir/final."""
    seed: int = 0
    """Seed of everything that has no seed of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    num_threads: int | None = None
    """torch threads of a rank on CPU; None: cores / ranks on this machine."""

    def __post_init__(self) -> None:
        require(
            bool(self.output_dir),
            "trainer.output_dir",
            self.output_dir,
            "is required",
            "give a new folder",
        )
        for name in ("num_steps", "prompts_per_step", "max_tokens_per_microbatch"):
            require_positive(f"trainer.{name}", getattr(self, name))
        for name in ("eval_every", "num_dump_samples"):
            require(
                getattr(self, name) >= 0,
                f"trainer.{name}",
                getattr(self, name),
                "must be >= 0",
                "use 0 or more",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`megarl train`: reinforcement learning."""

    model: ModelConfig
    parallel: ParallelConfig
    rollout: RolloutConfig
    data: DataConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    optim: OptimConfig
    trainer: TrainerConfig


@dataclass(frozen=True, kw_only=True)
class SftTrainerConfig:
    """The supervised loop."""

    output_dir: str = ""
    """Run directory; must be new or empty. Required. The model is exported to output_dir/final."""
    num_steps: int = 100
    """Optimizer updates, >= 1."""
    rows_per_step: int = 32
    """Rows per update, >= 1."""
    max_tokens_per_microbatch: int = 4096
    """Packed tokens of a micro-batch; >= longest row."""
    max_tokens: int = 1024
    """Longest row (prompt + answer), tokens; longer ones are dropped and counted."""
    seed: int = 0
    """Seed of everything that has no seed of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    num_threads: int | None = None
    """torch threads of a rank on CPU; None: cores / ranks on this machine."""

    def __post_init__(self) -> None:
        require(
            bool(self.output_dir),
            "trainer.output_dir",
            self.output_dir,
            "is required",
            "give a new folder",
        )
        for name in ("num_steps", "rows_per_step", "max_tokens_per_microbatch", "max_tokens"):
            require_positive(f"trainer.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """`megarl sft`: supervised warm start; extra_info.answer of a row is the text to imitate."""

    model: ModelConfig
    parallel: ParallelConfig
    data: DataConfig
    optim: OptimConfig
    trainer: SftTrainerConfig
