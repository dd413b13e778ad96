"""Packaging. `kernels/` is installed as the import package megarl_kernels."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = next(
    line.split('"')[1]
    for line in (here / "megarl/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    name="megarl",
    version=version,
    description=(
        "Reinforcement learning for language models: "
        "Megatron-core trains, SGLang generates, torchrun runs it"
    ),
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megarl", "megarl.*"]),
        "megarl_kernels",
        *(f"megarl_kernels.{p}" for p in find_packages("kernels")),
    ],
    package_dir={"megarl_kernels": "kernels"},
    package_data={
        "megarl": ["py.typed", "**/*.jinja", "**/*.pth"],
        "megarl_kernels": ["native/*.cpp", "native/*.h"],
    },
    # Engines and megatron come from requirements/{cpu,gpu}.txt: their own metadata pulls CUDA in.
    install_requires=[
        "torch>=2.9",
        "numpy",
        "safetensors",
        "transformers>=5.0",
        "omegaconf>=2.3",
        "pyarrow",
        "psutil",
        "scipy",
        "tensorboard",
        "plotext>=5.3,<6",
    ],
    entry_points={"console_scripts": ["megarl = megarl.cli.main:main"]},
)
