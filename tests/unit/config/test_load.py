from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from megarl.config import ConfigError, SftConfig, TrainConfig, load_config, resolved_yaml

REQUIRED = ["model.path=m", "data.train_files=[a.parquet]", "trainer.output_dir=out"]


def refused(
    path: Path, *overrides: str, schema: type[TrainConfig] | type[SftConfig] = TrainConfig
) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(schema, path, [*REQUIRED, *overrides])
    return str(error.value)


def test_file_overrides_and_defaults_are_merged_in_this_order(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("trainer: {num_steps: 7, prompts_per_step: 3}\noptim: {lr: 5e-4}\n")
    config = load_config(
        TrainConfig, path, [*REQUIRED, "trainer.num_steps=9", "trainer.num_steps=11"]
    )
    assert config.trainer.num_steps == 11
    assert config.trainer.prompts_per_step == 3
    assert config.optim.lr == 5e-4
    assert config.optim.beta2 == 0.999
    assert config.data.train_files == ["a.parquet"]


def test_override_values_are_read_as_yaml(empty_yaml: Path) -> None:
    config = load_config(
        TrainConfig,
        empty_yaml,
        [
            *REQUIRED,
            "optim.lr=3e-5",
            "parallel.dp=null",
            "data.shuffle=false",
            "rollout.stop_token_ids=[1, 2]",
            "reward.options.method=flexible",
            "model.path=a=b",
            "rollout.temperature=1",
        ],
    )
    assert config.optim.lr == 3e-5
    assert config.parallel.dp is None
    assert config.data.shuffle is False
    assert config.rollout.stop_token_ids == [1, 2]
    assert config.reward.options == {"method": "flexible"}
    assert config.model.path == "a=b"
    assert config.rollout.temperature == 1.0
    assert isinstance(config.rollout.temperature, float)


def test_config_is_frozen(empty_yaml: Path) -> None:
    config = load_config(TrainConfig, empty_yaml, REQUIRED)
    with pytest.raises(FrozenInstanceError):
        config.trainer.num_steps = 3  # type: ignore[misc]


def test_interpolation_takes_values_of_other_sections_and_of_the_environment(
    empty_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", "/runs")
    config = load_config(
        TrainConfig,
        empty_yaml,
        [
            *REQUIRED,
            "trainer.seed=5",
            "data.seed=${trainer.seed}",
            "trainer.output_dir=${oc.env:RUNS}/1",
            "rollout.num_samples=${trainer.prompts_per_step}",
            "reward.options.method=${model.dtype}",
        ],
    )
    assert config.data.seed == 5
    assert config.trainer.output_dir == "/runs/1"
    assert config.rollout.num_samples == 8  # the default of the other key
    assert config.reward.options == {"method": "float32"}


def test_resolved_yaml_loads_back_to_an_equal_config(tmp_path: Path, empty_yaml: Path) -> None:
    overrides = [
        'model.path="1e5"',
        "data.train_files=['no', '${oc.env:HOME}', 'a: b']",
        "optim.lr=1e-7",
    ]
    config = load_config(
        TrainConfig, empty_yaml, [*REQUIRED, *overrides, "trainer.output_dir='\\${x}'"][1:]
    )
    assert config.trainer.output_dir == "${x}"
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(TrainConfig, path) == config


def test_misspelt_key_is_refused_with_a_suggestion_and_the_valid_keys(empty_yaml: Path) -> None:
    message = refused(empty_yaml, "trainer.num_step=3")
    assert message == (
        "unknown key trainer.num_step (did you mean trainer.num_steps?); valid keys of trainer: "
        "output_dir, "
        "num_steps, prompts_per_step, max_tokens_per_microbatch, eval_every, num_dump_samples, "
        "save_final, seed, "
        "device, num_threads"
    )


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("foo=1", ""),
        ("learning_rate=1", "(did you mean optim.lr?)"),
        ("optim.learnig_rate=1", "(did you mean optim.lr?)"),
        ("data.train_batch_size=1", "(did you mean trainer.prompts_per_step?)"),
        ("lr=1", "(did you mean optim.lr?)"),
        ("trainer.lr=1", "(did you mean optim.lr?)"),
        ("optm.lr=1", "(did you mean optim?)"),
        ("rollout.nums_samples=1", "(did you mean rollout.num_samples?)"),
        ("model.dtypes=float32", "(did you mean model.dtype?)"),
        ("trainer.temperatur=1", "(did you mean rollout.temperature?)"),
    ],
)
def test_suggestion_looks_in_the_section_then_at_all_keys_and_other_products_words(
    empty_yaml: Path, override: str, suggestion: str
) -> None:
    message = refused(empty_yaml, override)
    assert message.startswith("unknown key ")
    assert (suggestion in message) if suggestion else ("did you mean" not in message)


def test_unknown_section_lists_the_sections_of_this_command(empty_yaml: Path) -> None:
    message = refused(empty_yaml, "rollout.tp=2", schema=SftConfig)
    assert message.endswith("valid sections: model, parallel, data, optim, trainer")


def test_unknown_key_in_a_yaml_file_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optim: {learnig_rate: 1}\n1: 2\n")
    message = refused(path)
    assert (
        "unknown key optim.learnig_rate (did you mean optim.lr?); valid keys of optim: lr, min_lr"
        in message
    )
    assert "unknown key 1" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp=two", "parallel.tp='two' must be an integer; it is str"),
        ("parallel.tp=2.0", "parallel.tp=2.0 must be an integer; it is float"),
        ("parallel.tp=true", "parallel.tp=True must be an integer; it is bool"),
        ("parallel.tp=", "parallel.tp=None must be an integer; it is null"),
        ("parallel.dp=x", "parallel.dp='x' must be an integer or null; it is str"),
        ("optim.lr=fast", "optim.lr='fast' must be a number; it is str"),
        ("optim.lr=.nan", "optim.lr=nan must be a number; it is float"),
        ("optim.lr=.inf", "optim.lr=inf must be a number; it is float"),
        ("data.shuffle=1", "data.shuffle=1 must be true or false; it is int"),
        (
            "trainer.output_dir=no",
            "trainer.output_dir=False must be text; quote it: trainer.output_dir='\"False\"'",
        ),
        (
            "data.val_files=b.parquet",
            "data.val_files='b.parquet' must be a list of texts; use data.val_files=[b.parquet]",
        ),
        (
            "rollout.stop_token_ids=[a]",
            "rollout.stop_token_ids=['a'] must be a list of integers; it is list",
        ),
        ("reward.options=strict", "reward.options='strict' must be a mapping; it is str"),
        (
            "model.dtype=bfloat",
            "model.dtype='bfloat' must be one of float32, bfloat16 (did you mean bfloat16?); use "
            "model.dtype=float32",
        ),
        ("model=foo", "model='foo' must be a section of key: value lines, e.g. model: {...}"),
        (
            "parallel.tp=${nope}",
            "parallel.tp=${nope}: Interpolation key 'nope' not found; correct the interpolation",
        ),
        ("parallel.tp=${optim.lr}", "parallel.tp=1e-06 must be an integer; it is float"),
        (
            "parallel.tp=[1",
            "parallel.tp=[1 is not YAML: did not find expected ',' or ']'; quote or close it",
        ),
        ("tp", "override 'tp' must read section.key=value, e.g. trainer.num_steps=100"),
        ("=3", "override '=3' must read section.key=value, e.g. trainer.num_steps=100"),
        ("parallel.tp=0", "parallel.tp=0 must be > 0; use a positive number"),
        ("rollout.top_p=0", "rollout.top_p=0.0 must be in (0.0, 1.0]; use a number in that range"),
    ],
)
def test_wrong_value_names_key_value_rule_and_remedy(
    empty_yaml: Path, override: str, message: str
) -> None:
    assert refused(empty_yaml, override) == message


def test_everything_that_is_wrong_is_reported_at_once(empty_yaml: Path) -> None:
    lines = refused(empty_yaml, "parallel.tp=x", "optim.lr=-1", "model.dtype=int8").splitlines()
    assert [line.split("=")[0] for line in lines] == ["model.dtype", "parallel.tp", "optim.lr"]


def test_required_keys_are_named(empty_yaml: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, empty_yaml)
    assert [line.split("=")[0] for line in str(error.value).splitlines()] == [
        "model.path", "data.train_files", "trainer.output_dir"
    ]  # fmt: skip


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.yaml") == (
        f"config file {tmp_path / 'no.yaml'} does not exist; give the path of a YAML file"
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("trainer:\n  num_steps: [1\noptim: {}\n", ":3:"),
        ("a: 1\n b: 2\n", ":2:"),
        ("optim: {}\noptim: {}\n", ":2:"),
    ],
)
def test_yaml_syntax_error_names_the_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    message = refused(path)
    assert message.startswith(f"{path}{where}")
    assert message.endswith("; correct the YAML there")


def test_binary_and_list_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert str(path) in refused(path)
    path.write_text("- 1\n")
    assert "it is a list" in refused(path)


def test_loading_a_config_imports_nothing_heavy(empty_yaml: Path) -> None:
    code = (
        "import sys\nfrom megarl.config import TrainConfig, load_config, resolved_yaml\n"
        f"resolved_yaml(load_config(TrainConfig, {str(empty_yaml)!r}, {REQUIRED!r}))\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'megatron', 'sglang', 'pyarrow') if "
        "m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
