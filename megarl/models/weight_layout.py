"""weight_layout: what each training rank holds of a Hugging Face checkpoint, as boxes.

Made from the family's rules alone, so any rank can compute any other rank's layout. Used for
import, export and resharding. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.errors import require
from megarl.models.families import ModelSpec, Source, Split, TensorRule, model_spec
from megarl.parallel.dims import ParallelDims
from megarl.types.layout import Box, Placement, WeightLayout

__all__ = ["padded_vocab_size", "pipeline_split", "weight_layout"]

Piece = tuple[Source, Box, Box]  # (source tensor, box in it, box in the local parameter)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Smallest multiple of tp that holds the vocabulary."""
    return -(-vocab_size // tp) * tp


def pipeline_split(num_layers: int, pp: int) -> list[int]:
    """Layers per pipeline stage: equal, or equal in the middle and the rest at the two ends.

    Megatron allows only the first and the last stage to differ. The first gets more than the last,
    which also computes the output layer. Raises ConfigError when there are fewer layers than
    stages.
    """
    require(
        1 <= pp <= num_layers, "parallel.pp", pp,
        f"needs at least one of the {num_layers} layers per stage",
        f"use parallel.pp between 1 and {num_layers}",
    )  # fmt: skip
    if num_layers % pp == 0:
        return [num_layers // pp] * pp
    middle = -(-num_layers // pp)
    if num_layers - middle * (pp - 2) < 2:
        middle -= 1
    ends = num_layers - middle * (pp - 2)
    return [ends - ends // 2, *[middle] * (pp - 2), ends // 2]


def weight_layout(hf_config: Mapping[str, Any], dims: ParallelDims, rank: int) -> WeightLayout:
    """Local parameters of global rank `rank` and where each comes from in the checkpoint.

    Parameter names are those of the built GPTModel. Rows that pad the vocabulary are in no
    placement. With tied embeddings and pp > 1 the last stage's output_layer.weight is placed from
    the embedding, too.

    Raises:
        ConfigError: the model is not supported, or does not divide over tp or pp.
        ValueError: `rank` is not in the role's pool.
    """
    spec = model_spec(hf_config)
    _check_tp(spec, dims.tp)
    at = dims.coordinate(rank)
    layout = WeightLayout(canonical_shapes=spec.canonical_shapes(), parameters={})
    for rule, layer, local_layer in _stage_rules(spec, at.pp, dims.pp):
        parameter = rule.parameter.format(layer=local_layer)
        shape, pieces = _shard(rule, spec, at.tp, dims.tp)
        layout.parameters[parameter] = shape
        for source, source_box, target in pieces:
            layout.placements.append(
                Placement(source.name.format(layer=layer), source_box, parameter, target)
            )
    return layout


def _check_tp(spec: ModelSpec, tp: int) -> None:
    sizes = {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.ffn_size,
    }
    allowed = [n for n in range(1, spec.num_kv_heads + 1) if not any(s % n for s in sizes.values())]
    for what, size in sizes.items():
        require(
            size % tp == 0, "parallel.tp", tp, f"does not divide {what}={size} of the model",
            f"use one of {allowed}",
        )  # fmt: skip


def _stage_rules(spec: ModelSpec, stage: int, pp: int) -> Iterator[tuple[TensorRule, int, int]]:
    """(rule, layer in the model, layer on the stage) of one stage; layers are 0 where unused."""
    split = pipeline_split(spec.num_layers, pp)
    if stage == 0:
        yield from ((rule, 0, 0) for rule in spec.first_rules())
    for local in range(split[stage]):
        yield from ((rule, sum(split[:stage]) + local, local) for rule in spec.layer_rules())
    if stage == pp - 1:
        yield from ((rule, 0, 0) for rule in spec.last_rules(is_first_stage=stage == 0))


def _rows(shape: tuple[int, ...], start: int, stop: int) -> Box:
    """Rows start..stop of a tensor, all of its other dimensions."""
    return Box((start, *(0 for _ in shape[1:])), (stop, *shape[1:]))


def _shard(
    rule: TensorRule, spec: ModelSpec, rank: int, tp: int
) -> tuple[tuple[int, ...], list[Piece]]:
    """Local shape and pieces of one parameter on tp rank `rank`."""
    source = rule.sources[0]
    shape = source.shape
    match rule.split:
        case Split.REPLICATED:
            return shape, [(source, Box.full(shape), Box.full(shape))]
        case Split.ROW:
            width = shape[1] // tp
            local = (shape[0], width)
            box = Box((0, rank * width), (shape[0], (rank + 1) * width))
            return local, [(source, box, Box.full(local))]
        case Split.VOCAB:
            rows = padded_vocab_size(shape[0], tp) // tp
            start, stop = rank * rows, min((rank + 1) * rows, shape[0])
            box = _rows(shape, start, stop)
            pieces = [(source, box, _rows(shape, 0, stop - start))] if start < stop else []
            return (rows, *shape[1:]), pieces
        case Split.STACKED:
            rows = shape[0] // tp
            pieces = [
                (
                    s,
                    _rows(shape, rank * rows, (rank + 1) * rows),
                    _rows(shape, i * rows, (i + 1) * rows),
                )
                for i, s in enumerate(rule.sources)
            ]
            return (rows * len(rule.sources), *shape[1:]), pieces
        case Split.QKV:
            return _shard_qkv(rule.sources, spec, rank, tp)


def _shard_qkv(
    sources: tuple[Source, ...], spec: ModelSpec, rank: int, tp: int
) -> tuple[tuple[int, ...], list[Piece]]:
    """Megatron's interleaved order: q..q k v of one KV group, then of the next."""
    query_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim
    heights = (query_rows, spec.head_dim, spec.head_dim)  # of q, k, v within a group
    groups = spec.num_kv_heads // tp
    tail = sources[0].shape[1:]
    pieces, row = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for source, height in zip(sources, heights, strict=True):
            box = _rows(source.shape, group * height, (group + 1) * height)
            pieces.append((source, box, _rows((0, *tail), row, row + height)))
            row += height
    return (row, *tail), pieces
