"""Import and export of Hugging Face checkpoints by tensor: no rank ever holds a whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.parallel import ParallelGroups, all_agree
from megarl.types.layout import Placement, WeightLayout

__all__ = ["load_hf_weights", "save_hf_weights"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tensors that some checkpoints carry and none needs: old RoPE buffers, and a copy of a tied output
# layer.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
IGNORED_IF_TIED = "lm_head.weight"
COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "*.model", "*.tiktoken",
)  # fmt: skip
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def load_hf_weights(
    folder: str | Path, layout: WeightLayout, named_parameters: Mapping[str, torch.Tensor]
) -> None:
    """Fill the local parameters from a checkpoint, reading only this rank's boxes. Not collective.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and its shards.
        layout: this rank's layout; names the same parameters as `named_parameters`.
        named_parameters: local tensors, any device and float dtype; values are converted. Elements
            that no placement covers (vocabulary padding) become 0.

    Raises:
        FileNotFoundError: no weights in the folder, or a shard is missing.
        ValueError: a tensor is missing, unknown or has another shape than config.json says.
    """
    folder = Path(folder)
    files = _find_tensors(folder)
    _check_names(folder, files, layout)
    if set(named_parameters) != set(layout.parameters):
        odd = sorted(set(named_parameters) ^ set(layout.parameters))
        raise RuntimeError(f"the built model and its weight layout disagree about {odd[:5]}")
    with torch.no_grad(), ExitStack() as stack:
        for name, covered in layout.covered_elements():
            if covered < named_parameters[name].numel():
                named_parameters[name].zero_()
        opened: dict[str, Any] = {}
        for placement in layout.placements:
            file = files[placement.canonical]
            if file not in opened:
                opened[file] = stack.enter_context(_open(folder / file))
            _read(
                folder / file,
                opened[file],
                placement,
                layout,
                named_parameters[placement.parameter],
            )


def _open(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is named in {INDEX} but does not exist; download the model again"
        )
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as e:
        raise ValueError(
            f"{path} cannot be read as safetensors ({e}); download the model again"
        ) from e


def _find_tensors(folder: Path) -> dict[str, str]:
    """{tensor name: file name} of the checkpoint."""
    if (folder / INDEX).exists():
        return dict(json.loads((folder / INDEX).read_text())["weight_map"])
    if (folder / SINGLE).exists():
        with _open(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    others = sorted(p.name for pattern in ("*.safetensors", "*.bin") for p in folder.glob(pattern))
    found = f"it has {', '.join(others)}" if others else "it has no weights at all"
    raise FileNotFoundError(
        f"model.path={str(folder)!r} has neither {SINGLE} nor {INDEX}: {found}; "
        "give a folder written by save_pretrained (safetensors)"
    )


def _check_names(folder: Path, files: Mapping[str, str], layout: WeightLayout) -> None:
    missing = sorted(set(layout.canonical_shapes) - set(files))
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} tensors that config.json implies are missing, "
            f"first {missing[:3]}"
        )
    extra = sorted(
        name for name in set(files) - set(layout.canonical_shapes)
        if not name.endswith(IGNORED_SUFFIXES) and name != IGNORED_IF_TIED
    )  # fmt: skip
    if extra:
        raise ValueError(
            f"{folder}: {len(extra)} tensors are not part of the model that config.json describes, "
            f"first {extra[:3]}; the folder holds another architecture or option"
        )


def _read(
    path: Path, file: Any, placement: Placement, layout: WeightLayout, parameter: torch.Tensor
) -> None:
    """Copy one box from an open safetensors file into a local parameter."""
    stored = file.get_slice(placement.canonical)
    shape, expected = tuple(stored.get_shape()), layout.canonical_shapes[placement.canonical]
    if shape != expected:
        raise ValueError(
            f"{path}: {placement.canonical} has shape {shape}, config.json implies {expected}; "
            "config.json and weights do not belong together"
        )
    parameter[placement.target.slices].copy_(stored[placement.source.slices])


def save_hf_weights(
    folder: str | Path,
    source: str | Path,
    layouts: Mapping[int, WeightLayout],
    named_parameters: Mapping[str, torch.Tensor],
    groups: ParallelGroups,
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write the role's weights as a Hugging Face folder. Collective; the role's first rank writes.

    Tensors are gathered one at a time, each box from the first rank that holds it; a shard is
    written as soon as it is full. The folder appears under its name only when it is complete.

    Args:
        folder: new or empty.
        source: folder to copy config, tokenizer and generation settings from.
        layouts: {global rank: layout} of the ranks of one replica, the same on every rank of the
            role.
        named_parameters: this rank's parameters; written in their dtype.
        groups: groups of the role.
        max_shard_bytes: largest shard, except for a tensor that alone is larger.

    Raises:
        ValueError: the folder exists and is not empty.
        OSError: the disk is full, or the like. PeerFailure: the same on the writing rank.
    """
    folder, source = Path(folder), Path(source)
    rank, writer_rank = dist.get_rank(), groups.dims.rank_offset
    any_layout = next(iter(layouts.values()))
    dtype = next(iter(named_parameters.values())).dtype
    writer = _Writer(folder, any_layout, dtype, max_shard_bytes) if rank == writer_rank else None
    all_agree(f"creating {folder}", writer.open if writer else _nothing, groups.role)
    failure: OSError | None = None
    holders = _first_holders(layouts)
    for name, shape in any_layout.canonical_shapes.items():
        tensor = _gather(name, shape, holders[name], named_parameters, writer_rank, groups)
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except OSError as e:  # keep receiving: the other ranks are sending
                failure = e

    def finish() -> None:
        if failure is not None:
            raise failure
        if writer is not None:
            writer.close(source)

    all_agree(f"writing {folder}", finish, groups.role)


def _nothing() -> None:
    """What ranks other than the writing one do."""


def _first_holders(layouts: Mapping[int, WeightLayout]) -> dict[str, list[tuple[int, Placement]]]:
    """{tensor: (rank, placement) of each distinct box}: every element comes from one rank."""
    found: dict[str, dict[Any, tuple[int, Placement]]] = {}
    for rank, layout in sorted(layouts.items()):
        for placement in layout.placements:
            found.setdefault(placement.canonical, {}).setdefault(
                placement.source, (rank, placement)
            )
    return {name: list(boxes.values()) for name, boxes in found.items()}


def _gather(
    name: str,
    shape: tuple[int, ...],
    pieces: list[tuple[int, Placement]],
    named_parameters: Mapping[str, torch.Tensor],
    writer_rank: int,
    groups: ParallelGroups,
) -> torch.Tensor | None:
    """The whole tensor, on the CPU of `writer_rank`; None elsewhere."""
    rank = dist.get_rank()
    covered = sum(p.source.num_elements for _, p in pieces)
    whole: torch.Tensor | None = None
    like = next(iter(named_parameters.values()))
    if rank == writer_rank:
        whole = torch.empty(shape, dtype=like.dtype)
        assert covered == whole.numel(), (
            f"{name}: {covered} of {whole.numel()} elements have a holder"
        )
    for holder, placement in pieces:
        if rank == holder:
            piece = named_parameters[placement.parameter].detach()[placement.target.slices]
            if whole is None:
                dist.send(piece.contiguous(), dst=writer_rank, group=groups.role)
            else:
                whole[placement.source.slices] = piece.cpu()
        elif whole is not None:
            buffer = torch.empty(placement.source.shape, dtype=like.dtype, device=like.device)
            dist.recv(buffer, src=holder, group=groups.role)
            whole[placement.source.slices] = buffer.cpu()
    return whole


class _Writer:
    """Sharded safetensors in a temporary folder that is renamed at the end."""

    def __init__(
        self, folder: Path, layout: WeightLayout, dtype: torch.dtype, max_shard_bytes: int
    ) -> None:
        self._folder, self._temporary = folder, folder.with_name(f".{folder.name}.incomplete")
        self._dtype = dtype
        self._file_of = dict(
            _assign_shards(layout.canonical_shapes, dtype.itemsize, max_shard_bytes)
        )
        self._total_bytes = dtype.itemsize * sum(
            torch.Size(shape).numel() for shape in layout.canonical_shapes.values()
        )
        self._pending: dict[str, torch.Tensor] = {}
        self._file = next(iter(self._file_of.values()))

    def open(self) -> None:
        if self._folder.exists() and any(self._folder.iterdir()):
            raise ValueError(f"{self._folder} exists and is not empty; give a new folder")
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)

    def add(self, name: str, tensor: torch.Tensor | None) -> None:
        """Take the next tensor, in the order of canonical_shapes."""
        assert tensor is not None
        if self._file_of[name] != self._file:
            self._flush()
            self._file = self._file_of[name]
        self._pending[name] = tensor

    def _flush(self) -> None:
        save_file(self._pending, self._temporary / self._file, metadata={"format": "pt"})
        self._pending = {}

    def close(self, source: Path) -> None:
        """Write the rest, the index and the files around the weights; then show the folder."""
        self._flush()
        if len(set(self._file_of.values())) > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._file_of}
            (self._temporary / INDEX).write_text(json.dumps(index, indent=2))
        for pattern in COPIED:
            for path in source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, self._temporary / path.name)
        self._set_config_dtype()
        if self._folder.exists():
            self._folder.rmdir()
        self._temporary.rename(self._folder)

    def _set_config_dtype(self) -> None:
        """Readers load weights in the dtype config.json names; it must be the one written."""
        path = self._temporary / "config.json"
        config = json.loads(path.read_text())
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        if config.get(key) != DTYPE_NAMES[self._dtype]:
            config[key] = DTYPE_NAMES[self._dtype]
            path.write_text(json.dumps(config, indent=2) + "\n")


def _assign_shards(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_shard_bytes: int
) -> Iterator[tuple[str, str]]:
    """(tensor, file name), filling shards in order; one shard is called model.safetensors."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = itemsize * torch.Size(shape).numel()
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    for i, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        yield from ((name, file) for name in names)
