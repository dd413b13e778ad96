"""Settings: schema with all defaults, strict loading, rules. Importing it imports no torch."""

from megarl.config.errors import ConfigError
from megarl.config.load import load_config, resolved_yaml
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.validate import ResolvedDims, validate_sft, validate_train

__all__ = [
    "ConfigError",
    "ResolvedDims",
    "SftConfig",
    "TrainConfig",
    "load_config",
    "resolved_yaml",
    "validate_sft",
    "validate_train",
]
