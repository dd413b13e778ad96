"""YAML file + `key=value` overrides -> a frozen config. The only module that knows OmegaConf.

Strict: an unknown key, a value of another type and a failing rule are all reported, each with its
key, before anything heavy is imported. Interpolation (`${trainer.seed}`, `${oc.env:HOME}`) works.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.config.errors import ConfigError
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.typecheck import choices_of, coerce, describe_type, did_you_mean

__all__ = ["load_config", "resolved_yaml", "sections_of"]

# What verl, TRL and torch call these settings
_OTHER_WORDS = {
    "learning_rate": "optim.lr",
    "betas": "optim.beta1",
    "max_grad_norm": "optim.clip_grad",
    "warmup_steps": "optim.num_warmup_steps",
    "batch_size": "trainer.prompts_per_step",
    "train_batch_size": "trainer.prompts_per_step",
    "max_steps": "trainer.num_steps",
    "total_training_steps": "trainer.num_steps",
    "num_generations": "rollout.num_samples",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "kl_loss_coef": "algorithm.kl_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "adv_estimator": "algorithm.advantage",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.loss_aggregation",
}

ConfigT = TypeVar("ConfigT", TrainConfig, SftConfig)


def load_config(schema: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Build a `schema` from its defaults, then the file, then the overrides in order.

    Args:
        path: YAML file with what differs from the defaults.
        overrides: `section.key=value`; the value is read as YAML.

    Raises:
        ConfigError: everything that is wrong, one line each: file, syntax, unknown keys, types,
            rules.
    """
    given = _read_file(Path(path))
    for override in overrides:
        given = OmegaConf.merge(given, _read_override(override))
    sections = sections_of(schema)
    plain = OmegaConf.to_container(given, resolve=False)
    errors = _unknown_keys(plain, sections)
    if errors:  # values cannot be judged while keys are unclear
        raise ConfigError("\n".join(errors))
    defaults = {name: _defaults(cls) for name, cls in sections.items()}
    merged = OmegaConf.merge(OmegaConf.create(defaults), given)
    built = {}
    for name, cls in sections.items():
        values, wrong = _section_values(merged, name, cls, plain.get(name) or {})
        errors += wrong
        if not wrong:
            try:
                built[name] = cls(**values)
            except ConfigError as error:
                errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return schema(**built)


def resolved_yaml(config: TrainConfig | SftConfig) -> str:
    """Every setting with its final value, as YAML that `load_config` reads back equal."""
    # Escaped, because a literal "${" in a value would be read back as an interpolation.
    return str(OmegaConf.to_yaml(OmegaConf.create(_escape(asdict(config)))))


def sections_of(schema: type[TrainConfig] | type[SftConfig]) -> dict[str, type[Any]]:
    """{section name: its dataclass}, in order."""
    return dict(get_type_hints(schema))


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escape(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _read_file(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(
            f"config file {path} does not exist; give the path of a YAML file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file {path} cannot be read: {error}; give a YAML text file"
        ) from None
    except YAMLError as error:
        raise ConfigError(f"{path}{_yaml_message(error)}; correct the YAML there") from None
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path}: {first}; correct the value there") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(
            f"{path} must hold sections such as `trainer: {{num_steps: 10}}`; it is a list"
        )
    return loaded


def _yaml_message(error: YAMLError) -> str:
    """`:line:column: problem`, lines from 1."""
    mark = getattr(error, "problem_mark", None)
    where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return f"{where}: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"


def _read_override(override: str) -> DictConfig:
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(
            f"override {override!r} must read section.key=value, e.g. trainer.num_steps=100"
        )
    try:
        return OmegaConf.from_dotlist([override])
    except YAMLError as error:
        problem = _yaml_message(error).split(": ", 1)[1]
        raise ConfigError(f"{key}={value} is not YAML: {problem}; quote or close it") from None
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{key}={value}: {str(error).splitlines()[0]}; correct the value"
        ) from None


def _unknown_keys(plain: Any, sections: dict[str, type[Any]]) -> list[str]:
    """One line for each key that is no section or no field of its section."""
    known = [f"{name}.{f.name}" for name, cls in sections.items() for f in fields(cls)]
    errors = []
    for name, values in plain.items():
        if name not in sections:
            hint = did_you_mean(str(name), sections) or _suggest("", str(name), known)
            errors.append(f"unknown key {name}{hint}; valid sections: {', '.join(sections)}")
            continue
        if values is not None and not isinstance(values, dict):
            errors.append(
                f"{name}={values!r} must be a section of key: value lines, e.g. {name}: {{...}}"
            )
            continue
        valid = [f.name for f in fields(sections[name])]
        for field_name in values or {}:
            if field_name not in valid:
                hint = _suggest(name, str(field_name), known)
                errors.append(
                    f"unknown key {name}.{field_name}{hint}; valid keys of {name}: "
                    f"{', '.join(valid)}"
                )
    return errors


def _suggest(section: str, field_name: str, known: list[str]) -> str:
    """Closest key of the section, else of all keys and of other products' words for them."""
    fields_of = {key.split(".")[1]: key for key in known if key.startswith(f"{section}.")}
    words = {other: key for other, key in _OTHER_WORDS.items() if key in known}
    anywhere = words | {key.split(".")[1]: key for key in known}
    for spellings in (fields_of, anywhere):
        close = difflib.get_close_matches(field_name, list(spellings), n=1, cutoff=0.75)
        if close:
            return f" (did you mean {spellings[close[0]]}?)"
    return ""


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _defaults(cls: type[Any]) -> dict[str, Any]:
    return {f.name: _default(f) for f in fields(cls)}


def _section_values(
    merged: Any, section: str, cls: type[Any], given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Resolved values of one section, and one line for each that does not fit its type."""
    hints = get_type_hints(cls)
    values, errors = _defaults(cls), []
    for name in given:
        key, hint = f"{section}.{name}", hints[name]
        try:
            value = merged[section][name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            errors.append(
                f"{key}={given[name]}: {str(error).splitlines()[0]}; correct the interpolation"
            )
            continue
        try:
            values[name] = coerce(value, hint)
        except TypeError:
            errors.append(
                f"{key}={value!r} must be {describe_type(hint)}{_type_remedy(key, value, hint)}"
            )
    return values, errors


def _type_remedy(key: str, value: object, hint: object) -> str:
    choices = choices_of(hint)
    if choices:
        return did_you_mean(str(value), choices) + f"; use {key}={choices[0]}"
    kind = describe_type(hint)
    if kind.startswith("a list") and isinstance(value, str | int):
        return f"; use {key}=[{value}]"
    if kind.startswith("text"):
        return f"; quote it: {key}='\"{value}\"'"
    return f"; it is {type(value).__name__ if value is not None else 'null'}"
