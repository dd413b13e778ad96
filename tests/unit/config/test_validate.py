from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import (
    ConfigError,
    SftConfig,
    TrainConfig,
    choices,
    load_config,
    validate_sft,
    validate_train,
)


def check(path: Path, overrides: list[str], world_size: int = 1) -> object:
    return validate_train(load_config(TrainConfig, path, overrides), world_size=world_size)


def refused(path: Path, overrides: list[str], world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        check(path, overrides, world_size)
    return str(error.value)


def test_valid_config_gives_the_mesh_with_dp_filled_in(empty_yaml: Path, base: list[str]) -> None:
    dims = validate_train(
        load_config(
            TrainConfig, empty_yaml, [*base, "parallel.tp=2", "parallel.pp=3", "rollout.tp=4"]
        ),
        world_size=24,
    )
    assert (dims.tp, dims.cp, dims.pp, dims.dp, dims.num_replicas) == (2, 1, 3, 4, 6)


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["parallel.tp=3"],
            3,
            "parallel.tp=3 does not divide num_attention_heads=32; use 1, 2, 4, 8, 16, 32",
        ),
        (["parallel.pp=4"], 4, "parallel.pp=4 does not divide num_hidden_layers=6; use 1, 2, 3, 6"),
        (
            ["parallel.tp=4"],
            6,
            "parallel.tp=4 * cp=1 * pp=1 = 4 does not divide the number of ranks 6; use a tp * cp "
            "* "
            "pp among "
            "1, 2, 3, 6, or start a multiple of 4 ranks",
        ),
        (
            ["parallel.tp=2", "parallel.dp=4"],
            4,
            "parallel.dp=4 times parallel.tp=2 * cp=1 * pp=1 is not the number of ranks 4; use "
            "parallel.dp=2 or "
            "null, or start 8 ranks",
        ),
        (
            ["rollout.tp=3"],
            3,
            "rollout.tp=3 does not divide num_attention_heads=32; use 1, 2, 4, 8, 16, 32",
        ),
        (["rollout.tp=4"], 6, "rollout.tp=4 does not divide the number of ranks 6; use 1, 2"),
        (
            ["algorithm.num_minibatches=4", "trainer.prompts_per_step=6"],
            1,
            "algorithm.num_minibatches=4 does not divide trainer.prompts_per_step=6; use 1, 2, 3, "
            "6",
        ),
        (
            ["trainer.prompts_per_step=2", "rollout.num_samples=3", "algorithm.num_minibatches=2"],
            4,
            "trainer.prompts_per_step=2 times rollout.num_samples=3 over "
            "algorithm.num_minibatches=2 "
            "is 3 samples, "
            "less than dp=4; use a multiple of 2 from 4",
        ),
        (
            ["data.max_prompt_tokens=4000", "rollout.max_new_tokens=97"],
            1,
            "data.max_prompt_tokens=4000 plus rollout.max_new_tokens=97 is 4097 tokens, more than "
            "the "
            "model's "
            "max_position_embeddings=4096; lower their sum to 4096",
        ),
        (
            ["rollout.max_total_tokens=1000"],
            1,
            "data.max_prompt_tokens=1024 plus rollout.max_new_tokens=256 is 1280 tokens, more than "
            "rollout.max_total_tokens=1000; lower their sum to 1000 or raise "
            "rollout.max_total_tokens",
        ),
        (
            ["rollout.context_length=1279"],
            1,
            "data.max_prompt_tokens=1024 plus rollout.max_new_tokens=256 is 1280 tokens, more than "
            "rollout.context_length=1279; lower their sum to 1279 or raise rollout.context_length",
        ),
        (
            ["trainer.max_tokens_per_microbatch=1279"],
            1,
            "data.max_prompt_tokens=1024 + rollout.max_new_tokens=256 is 1280 tokens, more than "
            "trainer.max_tokens_per_microbatch=1279; use trainer.max_tokens_per_microbatch=1280 or "
            "more, or lower "
            "the lengths",
        ),
        (
            [
                "rollout.max_new_tokens=255",
                "trainer.max_tokens_per_microbatch=1279",
                "parallel.tp=2",
                "parallel.sequence_parallel=true",
            ],
            2,
            "data.max_prompt_tokens=1024 + rollout.max_new_tokens=255 is 1280 tokens (padded to a "
            "multiple of "
            "tp=2), more than trainer.max_tokens_per_microbatch=1279; use "
            "trainer.max_tokens_per_microbatch=1280 "
            "or more, or lower the lengths",
        ),
        (
            ["algorithm.advantage=grop"],
            1,
            "algorithm.advantage='grop' is not a known name (did you mean grpo?); use "
            + ", ".join(choices.ADVANTAGES),
        ),
        (
            ["algorithm.policy_loss=ppoclip"],
            1,
            "algorithm.policy_loss='ppoclip' is not a known name (did you mean ppo_clip?); use "
            + ", ".join(choices.POLICY_LOSSES),
        ),
        (["reward.name=judge"], 1, "reward.name='judge' is not a known name; use number"),
        (
            ["reward.options.methd=strict"],
            1,
            "unknown key reward.options.methd (did you mean method?); valid options of number: "
            "method, format_reward",
        ),
        (
            ["reward.options.method=strct"],
            1,
            "reward.options.method='strct' is not a valid choice (did you mean strict?); use "
            "strict, "
            "flexible",
        ),
        (
            ["data.val_files=[/no/b.parquet]"],
            1,
            "data.val_files='/no/b.parquet' does not exist or is not a file; give Parquet files; "
            "`megarl prepare` writes them",
        ),
        (
            ["model.path=/no/model"],
            1,
            "model.path='/no/model' is not a folder on this machine; give a Hugging Face folder "
            "with "
            "config.json, "
            "*.safetensors and a tokenizer",
        ),
        (
            ["model.chat_template=/no.jinja"],
            1,
            "model.chat_template='/no.jinja' does not exist; give the path of a Jinja file, or "
            "null "
            "for the "
            "tokenizer's own",
        ),
    ],
)
def test_broken_rule_names_key_value_rule_and_remedy(
    empty_yaml: Path, base: list[str], overrides: list[str], world_size: int, message: str
) -> None:
    assert refused(empty_yaml, [*base, *overrides], world_size) == message


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_key_value_heads": 2}, 4, "does not divide num_key_value_heads=2; use 1, 2"),
        ({"intermediate_size": 33}, 2, "does not divide intermediate_size=33; use 1"),
    ],
)
def test_tp_must_divide_kv_heads_and_mlp_width(
    empty_yaml: Path,
    base: list[str],
    model_folder: Callable[..., Path],
    changes: dict[str, int],
    tp: int,
    message: str,
) -> None:
    model_folder(**changes)
    assert refused(empty_yaml, [*base, f"parallel.tp={tp}"], tp) == f"parallel.tp={tp} {message}"


def test_engine_may_have_more_ranks_than_kv_heads_when_they_divide(
    empty_yaml: Path, base: list[str], model_folder: Callable[..., Path]
) -> None:
    model_folder(num_key_value_heads=2)
    check(empty_yaml, [*base, "rollout.tp=8"], 8)
    model_folder(num_key_value_heads=3, num_attention_heads=24)
    assert refused(empty_yaml, [*base, "rollout.tp=2"], 2) == (
        "rollout.tp=2 neither divides nor is divided by num_key_value_heads=3; use 1, 3, 6, 12, 24"
    )


def test_kv_heads_default_to_attention_heads(
    empty_yaml: Path, base: list[str], model_folder: Callable[..., Path]
) -> None:
    model_folder(num_key_value_heads=None)
    check(empty_yaml, [*base, "parallel.tp=32"], 32)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no *.safetensors weights"),
        (
            "tokenizer.json",
            "has no tokenizer (none of tokenizer.json, tokenizer.model, vocab.json)",
        ),
        (
            "chat_template.jinja",
            "has a tokenizer without a chat template; set model.chat_template=PATH",
        ),
    ],
)
def test_missing_model_file_is_named(
    empty_yaml: Path, base: list[str], model_folder: Callable[..., Path], name: str, rule: str
) -> None:
    (model_folder() / name).unlink()
    assert rule in refused(empty_yaml, base)


def test_chat_template_may_stand_in_the_tokenizer_config_or_be_given(
    empty_yaml: Path, base: list[str], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    (model_folder() / "chat_template.jinja").rename(tmp_path / "my.jinja")
    check(empty_yaml, [*base, f"model.chat_template={tmp_path / 'my.jinja'}"])
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    check(empty_yaml, base)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "has architectures ['GPT2LMHeadModel']; use one of LlamaForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "has architectures []"),
        (
            {"num_hidden_layers": "six"},
            "has num_hidden_layers='six' in config.json, not a positive integer",
        ),
        (
            {"intermediate_size": 0},
            "has intermediate_size=0 in config.json, not a positive integer",
        ),
    ],
)
def test_unsupported_model_is_refused(
    empty_yaml: Path,
    base: list[str],
    model_folder: Callable[..., Path],
    changes: dict[str, object],
    rule: str,
) -> None:
    model_folder(**changes)
    assert rule in refused(empty_yaml, base)


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_unreadable_config_json_is_refused(
    empty_yaml: Path, base: list[str], model_folder: Callable[..., Path], text: str
) -> None:
    (model_folder() / "config.json").write_text(text)
    assert "has an unreadable config.json" in refused(empty_yaml, base)


def test_output_dir_must_be_new_or_empty(empty_yaml: Path, base: list[str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    check(empty_yaml, base)
    (tmp_path / "out" / "old").write_text("")
    assert refused(empty_yaml, base) == (
        f"trainer.output_dir='{tmp_path / 'out'}' is not empty; give a new folder, or move the old "
        "run away"
    )
    assert "is a file" in refused(
        empty_yaml, [*base, f"trainer.output_dir={tmp_path / 'out' / 'old'}"]
    )


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["trainer.rows_per_step=3"], 4,
         "trainer.rows_per_step=3 is less than dp=4: a rank would have no row; use at least 4"),
        (["trainer.max_tokens=5000", "trainer.max_tokens_per_microbatch=8000"], 1,
         "trainer.max_tokens=5000 exceeds the model's max_position_embeddings=4096; use at most "
         "4096"),
        (["trainer.max_tokens_per_microbatch=1000"], 1,
         "trainer.max_tokens=1024 is 1024 tokens, more than "
         "trainer.max_tokens_per_microbatch=1000; use "
         "trainer.max_tokens_per_microbatch=1024 or more, or lower the lengths"),
        (["data.val_files=[x]"], 1,
         "data.val_files=['x'] is not used by megarl sft; remove it; `megarl train` evaluates"),
        (["parallel.tp=3"], 3,
         "parallel.tp=3 does not divide num_attention_heads=32; use 1, 2, 4, 8, 16, 32"),
        (["parallel.tp=2"], 3,
         "parallel.tp=2 * cp=1 * pp=1 = 2 does not divide the number of ranks 3; use a tp * cp * "
         "pp among 1, 3, "
         "or start a multiple of 2 ranks"),
    ],
)  # fmt: skip
def test_sft_rules(
    empty_yaml: Path, base: list[str], overrides: list[str], world_size: int, message: str
) -> None:
    config = load_config(SftConfig, empty_yaml, [*base, *overrides])
    with pytest.raises(ConfigError) as error:
        validate_sft(config, world_size=world_size)
    assert str(error.value) == message


def test_valid_sft_config_gives_the_mesh(empty_yaml: Path, base: list[str]) -> None:
    dims = validate_sft(load_config(SftConfig, empty_yaml, [*base, "parallel.tp=2"]), world_size=4)
    assert (dims.tp, dims.dp) == (2, 2)
