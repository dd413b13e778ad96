from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_rows import make_row
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import ConfigError
from megarl.data import (
    DataError,
    PromptDataset,
    PromptOrder,
    encode_prompt,
    load_tokenizer,
    write_prompt_rows,
)


def test_prompt_has_the_template_and_one_bos(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    assert (
        tokenizer.encode("a")[0] == tokenizer.bos_token_id
    )  # so a second BOS would be easy to get
    ids = encode_prompt(
        tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b c"}]
    )
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>",
        "<system>",
        "a",
        "<user>",
        "b",
        "c",
        "<assistant>",
    ]


def test_chat_template_file_replaces_the_tokenizers_own(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0]['content'] }} h")
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=str(path))
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "h"]


def test_tokenizer_without_chat_template_is_refused_with_a_remedy(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tokenizer_folder)
    assert str(error.value) == (
        f"model.path='{tokenizer_folder}' has a tokenizer without a chat template; set "
        "model.chat_template=PATH"
    )


def test_tokenizer_without_eos_and_missing_folder_are_refused(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = tokenizer_folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    with pytest.raises(ConfigError, match="without eos_token"):
        load_tokenizer(tokenizer_folder)
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(tmp_path / "nothing")


def test_template_that_refuses_the_roles_names_file_and_row(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[0]['content'] == 'b' %}{{ raise_exception('no b') }}{% endif %}a"
    )
    write_prompt_rows(tmp_path / "p.parquet", [make_row("a"), make_row("b")])
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=str(template))
    with pytest.raises(DataError) as error:
        PromptDataset([tmp_path / "p.parquet"], tokenizer, max_prompt_tokens=9)
    assert str(error.value) == (
        f"{tmp_path}/p.parquet, row 1, column prompt: the chat template refuses messages of roles "
        "['user']: "
        "no b; correct the row"
    )


def test_dataset_tokenises_and_counts_what_it_drops(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_prompt_rows(tmp_path / "1.parquet", [make_row("a"), make_row("a b c d")])
    write_prompt_rows(tmp_path / "2.parquet", [make_row("b", "3", extra_info={"answer": "x"})])
    files = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    data = PromptDataset(files, load_tokenizer(tokenizer_folder), max_prompt_tokens=5)
    assert len(data) == 2
    assert data.num_dropped == 1
    last = data[1]
    assert (last.row, last.ground_truth, last.data_source) == (2, "3", "test")
    assert last.prompt_ids == [1, 3, 7, 5]
    assert last.messages == [{"role": "user", "content": "b"}]
    assert last.extra_info == {"answer": "x"}
    assert [p.row for p in data] == [0, 2]


def test_overlong_prompt_can_be_an_error(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_prompt_rows(tmp_path / "1.parquet", [make_row("a"), make_row("a b c d")])
    with pytest.raises(DataError) as error:
        PromptDataset(
            [tmp_path / "1.parquet"],
            load_tokenizer(tokenizer_folder),
            max_prompt_tokens=5,
            overlong="error",
        )
    assert str(error.value) == (
        f"{tmp_path}/1.parquet, row 1, column prompt: 7 tokens are more than "
        "data.max_prompt_tokens=5; raise it "
        "or use data.overlong_prompt=drop"
    )


def test_dropping_every_row_is_an_error(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_prompt_rows(tmp_path / "1.parquet", [make_row("a")])
    with pytest.raises(
        DataError, match=r"all 1 rows are longer than data\.max_prompt_tokens=2; raise it"
    ):
        PromptDataset(
            [tmp_path / "1.parquet"], load_tokenizer(tokenizer_folder), max_prompt_tokens=2
        )


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    batch = draw(st.integers(1, 12))
    return draw(st.integers(batch, 40)), batch


@given(sizes(), st.booleans(), st.integers(0, 5))
def test_each_row_comes_exactly_once_per_epoch_and_never_twice_in_a_batch(
    size: tuple[int, int], shuffle: bool, seed: int
) -> None:
    num_rows, batch = size
    order = PromptOrder(num_rows, batch, shuffle=shuffle, seed=seed)
    batches = [order.next_rows() for _ in range(4 * num_rows)]
    assert all(len(set(rows)) == len(rows) == batch for rows in batches)
    flat = [row for rows in batches for row in rows]
    for epoch in range(len(flat) // num_rows):
        assert sorted(flat[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(sizes(), st.integers(0, 30), st.integers(1, 30))
def test_order_resumes_from_a_json_state(size: tuple[int, int], before: int, after: int) -> None:
    num_rows, batch = size
    order = PromptOrder(num_rows, batch, seed=3)
    for _ in range(before):
        order.next_rows()
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(num_rows, batch, seed=3)
    resumed.load_state_dict(state)
    assert [resumed.next_rows() for _ in range(after)] == [order.next_rows() for _ in range(after)]


def test_order_without_shuffle_is_the_order_of_the_file() -> None:
    order = PromptOrder(5, 2, shuffle=False)
    # Epoch 1 begins inside the third batch, which holds 4 already.
    assert [order.next_rows() for _ in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert order.epoch == 2


def test_shuffled_order_depends_on_seed_and_epoch_only() -> None:
    # Pinned, because ranks and resumed runs rely on it being the same in every process.
    order = PromptOrder(6, 6, seed=0)
    first, second = order.next_rows(), order.next_rows()
    again = PromptOrder(6, 6, seed=0)
    assert (first, second) == (again.next_rows(), again.next_rows())
    assert first != second
    assert PromptOrder(6, 6, seed=1).next_rows() != first
    assert first == [0, 3, 4, 1, 5, 2]


def test_more_prompts_per_step_than_rows_is_refused() -> None:
    with pytest.raises(DataError) as error:
        PromptOrder(3, 4)
    assert str(error.value) == (
        "the data has 3 rows, fewer than the 4 a step takes; use at most 3 per step "
        "(trainer.prompts_per_step or "
        "trainer.rows_per_step) or more data"
    )


def test_state_of_other_data_is_refused() -> None:
    state = PromptOrder(10, 2).state_dict()
    with pytest.raises(DataError, match="saved with num_rows=10, now it is 11"):
        PromptOrder(11, 2).load_state_dict(state)
