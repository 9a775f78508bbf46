"""Load a configuration from YAML and `section.key=value` overrides; one error lists all problems."""

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import ValidationError

from configs.schema import Config, Section, did_you_mean

Schema = TypeVar("Schema", bound=Section)


class ConfigError(ValueError):
    """An invalid configuration. The text has one line per problem: file, key, value and the allowed values."""


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[Schema] = Config) -> Schema:
    """Read a YAML configuration and apply overrides to it.

    Args:
        path: the YAML file; paths inside it are relative to the current directory.
        overrides: "section.key=value", later ones win; the value is read as YAML ("4" is a number, "null" is none).
        schema: the sections that the file may have.

    Raises:
        ConfigError: lists all problems.
    """
    settings, problems = _read(Path(path), schema)
    # Origin of each value, so that an error names the file or the override.
    origin: dict[tuple[str, ...], str] = {}
    for override in overrides:
        problem = _apply(override, settings, origin, schema)
        if problem:
            problems.append(f"--set {_clipped(override, MOST_OF_VALUE)}: {problem}")
    config = None
    try:
        config = schema.model_validate(settings)
    except ValidationError as error:
        problems += [_describe(details, str(path), origin, schema) for details in error.errors()]
    if problems or config is None:
        count = f"{len(problems)} problem" + "s" * (len(problems) > 1)
        shown = (f"  {_clipped(line)}" for line in problems[:MOST_PROBLEMS])
        raise ConfigError("\n".join([f"{path}: {count} in the configuration", *shown]))
    return config


MOST_BYTES = 1_000_000  # of a file
MOST_SHOWN = 4_000  # characters of a problem: a value may be as long as the file
MOST_OF_VALUE = 200  # characters of a value
MOST_PROBLEMS = 100  # that are listed


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader for plain values: text, numbers, true, false, null, lists and mappings of words to them.

    Duplicate keys, of which YAML silently takes the last one, are recorded.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}  # filled below

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Without aliases, of which a few nested ones stand for gigabytes, and without tags."""
        event = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = f"*{event.anchor} is an alias; write the value out"
        elif getattr(event, "tag", None) is not None:
            problem = f"{event.tag} is a tag; write the value alone"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in first_line:
                self.duplicates.append(f"line {line}: {key.value} was already given in line {first_line[key.value]}")
            first_line.setdefault(key.value, line)
        return super().construct_mapping(node, deep)


# Of YAML 1.1 without numbers to base 2, 8, 16 and 60 (1:30 is 90), dates and merge keys, which stay text; with 1e-3,
# which YAML 1.1 takes for text. A whole number has 40 digits at most, so that it can be printed.
for kind, pattern, first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", list("tTfFyYnNoO")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,39})", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern})$"), first)


def _read(path: Path, schema: type[Section]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a file, and its duplicate keys as problems."""
    try:
        if not path.is_file() and path.exists():
            raise ConfigError(f"{path}: not a file; a YAML file is needed")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: of more than {MOST_BYTES:,} bytes; a configuration is a short YAML file")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        folder = path.parent
        found = ", ".join(sorted(p.name for p in folder.glob("*.yaml"))) if folder.is_dir() else ""
        others = f"{folder} contains {found}" if found else "no YAML file is in that folder"
        raise ConfigError(f"{path}: no such file; {others}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    try:
        settings, duplicates = _parse(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; a configuration has sections with keys") from None
    except yaml.YAMLError as error:
        raise ConfigError(_clipped(f"{path}: not valid YAML: {error}")) from error
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path}: holds a {type(settings).__name__}; sections are needed: {', '.join(schema.model_fields)}"
        )
    return settings, [f"{path}, {duplicate}" for duplicate in duplicates]


def _parse(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML text, and its duplicate keys."""
    loader = _Loader(text)
    try:
        return loader.get_single_data(), loader.duplicates
    finally:
        loader.dispose()


def _apply(
    override: str, settings: dict[str, Any], origin: dict[tuple[str, ...], str], schema: type[Section]
) -> str | None:
    """Put one override into `settings`; return the problem if it is malformed."""
    name, equals, text = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or len(key) != 2 or not all(key):
        return f"the form is section.key=value; the sections are {', '.join(schema.model_fields)}"
    try:
        value, duplicates = _parse(text)
    except (yaml.YAMLError, RecursionError):
        return f"the value {text[:100]!r} is not valid YAML; quote it"
    if duplicates:
        return duplicates[0]
    section = settings.setdefault(key[0], {})
    if section is None:  # a section left empty in the file
        section = settings[key[0]] = {}
    if isinstance(section, dict):
        section[key[1]] = value
        origin[key] = f"--set {_clipped(override, MOST_OF_VALUE)}"
    return None


def _describe(details: Any, path: str, origin: dict[tuple[str, ...], str], schema: type[Section]) -> str:
    """One line for one of pydantic's errors: place, key = value, allowed values."""
    key = tuple(str(part) for part in details["loc"])  # section, key, and the index in a list
    overrides = [override for written, override in origin.items() if written[: len(key)] == key]
    place = origin.get(key[:2]) or " with ".join([path, *overrides])
    name = ".".join(key)
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    shown = _clipped(repr(value), MOST_OF_VALUE)
    if kind == "value_error":  # raised by the schema; the text names keys and values
        return f"{place}: {context['error']}"
    if kind == "missing":
        return f"{place}: {name} is missing and has no default"
    if kind in ("extra_forbidden", "invalid_key"):  # the second: a number as a key
        allowed = _allowed_keys(key[:-1], schema)
        hint = did_you_mean(key[-1], allowed)
        return f"{place}: {name} = {shown}: no such key;{hint} allowed are {', '.join(allowed)}"
    if kind == "literal_error":
        words = context["expected"].split("'")[1::2]  # pydantic writes: 'layer' or 'batch'
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        return f"{place}: {name} = {shown}: not known;{hint} allowed are {context['expected']}"
    if kind == "model_type":
        return f"{place}: {name} = {shown}: a section is needed, with the keys {', '.join(_allowed_keys(key, schema))}"
    return f"{place}: {name} = {shown}: {details['msg'].removeprefix('Input ')}"


def _clipped(text: str, most: int = MOST_SHOWN) -> str:
    """A text without its middle if it is longer than `most`."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def _allowed_keys(section: tuple[str, ...], schema: type[Section]) -> tuple[str, ...]:
    """The keys of a section; of the configuration itself for ()."""
    allowed = schema.model_fields[section[0]].annotation if section else schema
    return tuple(allowed.model_fields)  # type: ignore[union-attr]
