"""Load a configuration from YAML and `section.key=value` overrides; one error lists all problems."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from configs.schema import Config, Section, did_you_mean

Schema = TypeVar("Schema", bound=Section)
MOST_SHOWN = 500  # characters of a value


class ConfigError(ValueError):
    """An invalid configuration. The text names the file and has a line per problem: key, value and what is allowed."""


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader that takes 1e-3 as a number. It refuses keys that are no text or given twice (YAML: the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for nth, (key, _) in enumerate(node.value):
            problem = "is given twice" if key.value in keys[:nth] else "is a key that is no text; quote it"
            if key.value in keys[:nth] or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise yaml.constructor.ConstructorError(None, None, f"{_clipped(key.value)} {problem}", key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[Schema] = Config) -> Schema:
    """Read a YAML configuration and apply overrides to it.

    Args:
        path: the YAML file; paths inside it are relative to the current directory.
        overrides: "section.key=value", or "key=value" where the schema has keys without a section; later ones win. The
            value is read as YAML ("4" is a number, "null" is none).
        schema: the sections or keys that the file may have.

    Raises:
        ConfigError: lists all problems.
    """
    given, path = " ".join([str(path), *(f"--set {one}" for one in overrides)]), Path(path)
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{path}: --set {override}: the form is section.key=value, or key=value for a benchmark")
    try:
        settings = read_yaml(path)
        for override in overrides:
            name, _, text = override.partition("=")
            section, _, key = name.strip().partition(".")
            value = parse_yaml(text)
            settings[section] = (settings.get(section) or {}) | {key: value} if key else value
        return schema.model_validate(settings)
    except FileNotFoundError:
        neighbours = ", ".join(sorted(one.name for one in path.parent.glob("*.yaml"))) or "no YAML file"
        raise ConfigError(f"{path}: no such file; {path.parent} contains {neighbours}") from None
    except ValidationError as error:
        problems: dict[str, list[str]] = {}  # several messages where a value may have several types
        for details in error.errors():
            name, text = _describe(details, settings, schema)
            problems.setdefault(name, []).append(text)
        lines = [f"{name}{' or '.join(dict.fromkeys(texts))}" for name, texts in problems.items()]
        count = f"{len(lines)} problem" + "s" * (len(lines) > 1)
        raise ConfigError("\n  ".join([f"{given}: {count} in the configuration", *lines])) from error
    except (OSError, ValueError, TypeError) as error:  # TypeError: a list as a section
        raise ConfigError(f"{given}: not valid YAML with sections and keys: {_clipped(error)}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file; an empty file has none.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file, or not YAML with keys.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is a folder, a pipe or a device; a file is needed")
    settings = parse_yaml(path.read_text(encoding="utf-8-sig"))
    if not isinstance(settings, dict | None):
        raise ValueError(f"it holds no keys but {_clipped(repr(settings))}")
    return settings or {}


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises a ValueError that says where it is not valid."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ValueError(_clipped(error)) from error


def _describe(details: Any, settings: Any, schema: type[Section]) -> tuple[str, str]:
    """The start and the end of a line about one of pydantic's errors: "key = value: " and what is wrong with it."""
    key, value = [], settings
    for part in details["loc"]:  # which ends in the type that pydantic tried, where there are several
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
        key.append(str(part))
    name = f"{'.'.join(key) or 'the file'} = {_clipped(repr(value))}: "
    match details["type"]:
        case "value_error":  # raised by the schema; the text names values, and keys unless they are of a mapping
            text, outer = str(details["ctx"]["error"]), ".".join(map(str, details["loc"]))
            return text if not outer or text.startswith(details["loc"][:1]) else f"{outer}: {text}", ""
        case "missing":
            return f"{'.'.join(details['loc'])}: ", "is missing and has no default"
        case "extra_forbidden" | "invalid_key":
            for part in details["loc"][:-1]:
                values = get_args(schema)  # of a mapping from names to sections
                schema = values[-1] if values else schema.model_fields[part].annotation
            allowed = list(schema.model_fields)
            return name, f"no such key;{did_you_mean(key[-1], allowed)} allowed are {', '.join(allowed)}"
        case "literal_error":
            words = details["ctx"]["expected"]  # 'layer' or 'batch'
            hint = did_you_mean(str(value), words.split("'")[1::2])
            return name, f"not known;{hint} allowed are {words}"
    return name, details["msg"].removeprefix("Input ")


def _clipped(text: object) -> str:
    text = str(text)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."
