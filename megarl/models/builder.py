"""Builds one role's GPTModel from a Hugging Face config, process groups and our own layer spec.

Groups are always passed: megatron's global parallel_state stays uninitialised, because a neutral
one gives wrong numbers silently while an uninitialised one raises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.schema import ModelConfig
from megarl.models import cpu_compat
from megarl.models.attention import PackedAttention
from megarl.models.families import ModelSpec, model_spec
from megarl.models.norm import RMSNorm
from megarl.models.weight_layout import padded_vocab_size, pipeline_split
from megarl.parallel import ParallelDims, ParallelGroups

__all__ = ["build_gpt", "process_groups"]


def process_groups(groups: ParallelGroups) -> ProcessGroupCollection:
    """The role's groups under megatron's names. No experts: every ep group has one rank."""
    assert groups.dims.cp == 1, "the cp group stands in for the group of one below"
    return ProcessGroupCollection(
        tp=groups.tp, cp=groups.cp, dp=groups.dp, pp=groups.pp, mp=groups.tp_pp, dp_cp=groups.dp_cp,
        tp_cp=groups.tp_cp, tp_dp_cp=groups.tp_dp_cp, embd=groups.embd, pos_embd=groups.pos_embd,
        ep=groups.cp, expt_tp=groups.tp, expt_dp=groups.dp, tp_ep=groups.tp, tp_ep_pp=groups.tp_pp,
        intra_dp_cp=groups.dp_cp, intra_expt_dp=groups.dp, intra_dist_opt=groups.role,
        inter_dist_opt=None, hcp=None,
    )  # fmt: skip


def build_gpt(
    hf_config: dict[str, Any],
    model: ModelConfig,
    groups: ParallelGroups,
    *,
    device: torch.device,
    seed: int,
) -> GPTModel:
    """This rank's shard of the model on `device`, weights not yet set. Collective over the role.

    Raises:
        ConfigError: the model is not supported or does not divide over the layout.
    """
    spec, dims = model_spec(hf_config), groups.dims
    pgs = process_groups(groups)
    _prepare_globals(groups, seed)
    config = _transformer_config(spec, model, dims, device)
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = pipeline_split(spec.num_layers, dims.pp)[groups.coordinate.pp]
    scaling: dict[str, Any] = {}
    if spec.rope_llama3_factor is not None:
        scaling = {"rope_scaling": True, "rope_scaling_factor": spec.rope_llama3_factor}
    gpt = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * num_layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab_size(spec.vocab_size, dims.tp),
        max_sequence_length=spec.max_positions,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=spec.is_tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        pg_collection=pgs,
        **scaling,
    )
    _mark_tensor_parallel(gpt)
    return gpt.to(device)


def _prepare_globals(groups: ParallelGroups, seed: int) -> None:
    """The three process-wide things megatron needs besides groups."""
    cpu_compat.install()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()  # scratch space, not a group
    # Recomputation and sequence parallelism fork this generator even though there is no dropout. On
    # CPU it is torch's default one, which belongs to the trainer.
    with torch.random.fork_rng(devices=[]):
        model_parallel_cuda_manual_seed(seed, tp_rank=groups.coordinate.tp, ep_rank=0, etp_rank=0)


def _transformer_config(
    spec: ModelSpec, model: ModelConfig, dims: ParallelDims, device: torch.device
) -> TransformerConfig:
    dtype = getattr(torch, model.dtype)
    extra: dict[str, Any] = {}
    split = pipeline_split(spec.num_layers, dims.pp)
    if len(set(split)) > 1:
        extra["num_layers_in_first_pipeline_stage"] = split[0]
        extra["num_layers_in_last_pipeline_stage"] = split[-1]
    if model.recompute == "full":
        extra.update(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    return TransformerConfig(
        **spec.transformer_kwargs(),
        **extra,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        context_parallel_size=dims.cp,
        sequence_parallel=dims.sequence_parallel,
        variable_seq_lengths=True,  # micro-batches differ in T; stages tell each other the shape
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths demands it, experts or not
        calculate_per_token_loss=True,  # DDP sums; the loss is already divided (see base.py)
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every weight comes from a checkpoint
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,  # frees tensors that a gloo send may still read
    )


def _mark_tensor_parallel(gpt: GPTModel) -> None:
    """Mark split weights: megatron does it while initialising, which is skipped.

    The gradient norm counts unmarked parameters on tp rank 0 only.
    """
    for module in gpt.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        if module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)
