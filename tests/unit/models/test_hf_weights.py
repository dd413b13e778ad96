"""Reading Hugging Face folders: streamed, checked, and clear about what is wrong with a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.pool import WorkerError, WorkerPool, groups_of
from distributed.tiny import make_model
from safetensors.torch import load_file, save_file

from megarl.config.schema import ModelConfig
from megarl.models import MegatronModel, weight_layout
from megarl.models.hf_weights import load_hf_weights, save_hf_weights
from megarl.parallel import ParallelDims


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_model(tmp_path / "m", "qwen2", tied=False))


def empty(layout: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in layout.parameters.items()
    }


def layout_of(folder: Path, dims: ParallelDims | None = None, rank: int = 0) -> Any:
    return weight_layout(
        json.loads((folder / "config.json").read_text()), dims or ParallelDims(), rank
    )


def edit(folder: Path, **change: torch.Tensor | None) -> None:
    """Rewrite model.safetensors with tensors replaced, added, or (None) removed."""
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def test_vocabulary_padding_is_zero_and_the_rest_is_the_checkpoint(folder: Path) -> None:
    layout = layout_of(folder, ParallelDims(tp=2), rank=1)
    parameters = empty(layout)
    load_hf_weights(folder, layout, parameters)
    weights = load_file(folder / "model.safetensors")
    embedding = parameters["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:-1], weights["model.embed_tokens.weight"][66:])
    assert torch.equal(embedding[-1], torch.zeros(32))
    assert not any(p.isnan().any() for p in parameters.values())


def test_values_are_converted_to_the_dtype_of_the_parameters(folder: Path) -> None:
    layout = layout_of(folder)
    parameters = empty(layout, torch.bfloat16)
    load_hf_weights(folder, layout, parameters)
    want = load_file(folder / "model.safetensors")["model.norm.weight"].bfloat16()
    assert torch.equal(parameters["decoder.final_layernorm.weight"], want)


def test_a_sharded_checkpoint_reads_like_a_single_file(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(
        sharded, max_shard_size="20KB"
    )
    assert (sharded / "model.safetensors.index.json").exists()
    layout = layout_of(folder)
    one, two = empty(layout), empty(layout)
    load_hf_weights(folder, layout, one)
    load_hf_weights(sharded, layout, two)
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_copy_of_the_output_layer_in_a_tied_checkpoint_is_ignored(tmp_path: Path) -> None:
    folder = Path(make_model(tmp_path / "m", "llama", tied=True))
    layout = layout_of(folder)
    without, with_copy = empty(layout), empty(layout)
    load_hf_weights(folder, layout, without)
    edit(folder, **{"lm_head.weight": torch.zeros(131, 32)})
    load_hf_weights(folder, layout, with_copy)
    assert without.keys() == with_copy.keys()
    assert all(torch.equal(without[n], with_copy[n]) for n in without)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    layout = layout_of(folder)
    with pytest.raises(
        FileNotFoundError,
        match=r"it has pytorch_model.bin; give a folder written by save_pretrained",
    ):
        load_hf_weights(folder, layout, empty(layout))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="it has no weights at all"):
        load_hf_weights(folder, layout, empty(layout))


def test_a_missing_shard_is_named(folder: Path) -> None:
    layout = layout_of(folder)
    index = {
        "weight_map": dict.fromkeys(layout.canonical_shapes, "model-00001-of-00002.safetensors")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002.safetensors is named in"):
        load_hf_weights(folder, layout, empty(layout))


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    layout = layout_of(folder)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read as safetensors"):
        load_hf_weights(folder, layout, empty(layout))


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    layout = layout_of(folder)
    edit(folder, **{"model.norm.weight": None})
    with pytest.raises(
        ValueError,
        match=r"1 tensors that config.json implies are missing, first \['model.norm.weight",
    ):
        load_hf_weights(folder, layout, empty(layout))
    edit(folder, **{"model.norm.weight": torch.ones(33)})
    with pytest.raises(
        ValueError, match=r"model.norm.weight has shape \(33,\), config.json implies \(32,\)"
    ):
        load_hf_weights(folder, layout, empty(layout))
    edit(
        folder,
        **{
            "model.norm.weight": torch.ones(32),
            "model.layers.0.self_attn.o_proj.bias": torch.ones(32),
        },
    )
    with pytest.raises(ValueError, match=r"1 tensors are not part of the model .*o_proj.bias"):
        load_hf_weights(folder, layout, empty(layout))


def export_in_shards(path: str, out: str, dtype: str) -> None:
    model = MegatronModel.build(
        ModelConfig(path=path, dtype=dtype),
        groups_of(tp=2),
        device=torch.device("cpu"),
        trainable=None,
    )
    layouts = {rank: weight_layout(model.hf_config, model.dims, rank) for rank in range(2)}
    save_hf_weights(
        out, path, layouts, model.named_parameters(), model.groups, max_shard_bytes=20_000
    )


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_export_is_loaded_by_transformers(
    folder: Path, tmp_path: Path, dtype: str, pool2: WorkerPool
) -> None:
    from transformers import AutoModelForCausalLM

    (folder / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    pool2.run(export_in_shards, path=str(folder), out=str(out), dtype=dtype)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 1
    assert all((out / f).stat().st_size < 21_000 or len(load_file(out / f)) == 1 for f in files)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    for name, tensor in want.state_dict().items():
        assert loaded.state_dict()[name].dtype == getattr(torch, dtype)
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert (out / "tokenizer.json").read_text() == "{}"


@pytest.mark.distributed
def test_an_export_refuses_a_folder_that_is_not_empty_on_every_rank(
    folder: Path, pool2: WorkerPool
) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 0:(.|\n)*exists and is not empty(.|\n)*rank 1:(.|\n)*PeerFailure"
    ):
        pool2.run(export_in_shards, path=str(folder), out=str(folder), dtype="float32")
