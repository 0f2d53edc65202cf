"""Reads YAML into validated Settings, writes them back as YAML, and prints the reference page.

    settings = load_settings(Path("config.yaml"))
    settings.scrape.concurrency

Unknown keys, wrong types and contradictions raise ConfigError, one line with the key's full path.

YAML is read with every value as text, so that a value's meaning follows from its key's type, not
its spelling: `no`, `1:30`, `010` and `2024-01-01` stay as written, and only null (`null`, `~`,
nothing) becomes None. The Snakefile uses this reader, too, because Snakemake's own takes `no` for
False.

A resolved file has every key, and ends with the names of those that differ from their default. A
later version of the toolkit that lacks a key still reads the file if the key had its default.

`python -m common.config > docs/config.md` writes the reference page from the models' docstrings.
"""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.errors import ConfigError
from common.files import write_text
from common.settings import Experiment, Section, Settings, closest, names

JOB_SETTINGS = "URLS_TO_GPT2_SETTINGS"
"""Environment variable of a job of the workflow: path of the run's resolved settings."""
_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
TOP_LEVEL = frozenset(Settings.model_fields) - frozenset(Experiment.model_fields)
"""What an override of a command with a model may name besides the model's own sections."""
_GIVEN = "# not the default: "


class _TextLoader(yaml.SafeLoader):
    """PyYAML's safe loader with only two implicit types, null and the merge key `<<`."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (_NULL, _MERGE)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose one mapping. Raises MarkedYAMLError if it has a key twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def _parse(text: str, source: str) -> object:
    """YAML text as plain data. Raises ConfigError with the line of the error."""
    try:
        return yaml.load(text, Loader=_TextLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of an explicit tag, such as `!!int x`
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for a file that has none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a YAML file") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else type(raw).__name__
        raise ConfigError(f"{path}: must be a mapping of keys, not {kind}")
    return raw


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with `more`, recursively; copied, because YAML aliases share sections."""
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def with_overrides(raw: Mapping[str, Any], overrides: Iterable[str], model: str | None = None) -> dict[str, Any]:
    """`raw` with each `section.key=value` set; keys of models are set in `models.<model>`.

    Raises ConfigError for a malformed override.
    """
    result = dict(raw)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise ConfigError(f"override {override!r} must read section.key=value")
        value = _parse(text, f"override {override!r}")
        keys = name.split(".")
        for key in reversed(["models", model, *keys] if model and keys[0] not in TOP_LEVEL else keys):
            value = {key: value}
        assert isinstance(value, dict)
        result = merged(result, value)
    return result


def _keys(section: type[Section] = Section) -> set[str]:
    """The names of the keys of all sections."""
    return set(section.model_fields).union(*map(_keys, section.__subclasses__()))


def _written(location: Iterable[str | int], raw: Any) -> Iterator[str | int]:
    """An error's location without the names that pydantic gives to the types of a union."""
    for part in location:
        is_there = part in raw if isinstance(raw, Mapping) else isinstance(raw, list) and isinstance(part, int)
        if is_there or isinstance(raw, Mapping):  # the file has no missing key
            yield part
        raw = raw[part] if is_there else raw


def validate(raw: Mapping[str, Any], source: str) -> Settings:
    """Validate plain data (a parsed YAML file). Raises ConfigError that names `source`."""
    try:
        return Settings.model_validate(dict(raw))
    except ValidationError as errors:
        # a misspelt key is missing, too: name what was written
        error = min(errors.errors(), key=lambda error: error["type"] != "extra_forbidden")
        location, kind, message = error["loc"], error["type"], error["msg"].removeprefix("Value error, ")
        if kind == "missing" and isinstance(location[-1], int):  # the second value of a pair
            location, kind, message = location[:-1], "too_short", "has too few values; docs/config.md has the default"
        elif kind in ("model_type", "dict_type"):
            message = "needs keys with values of their own; docs/config.md lists the keys"
        key = ".".join(map(str, _written(location, raw)))
        if kind == "extra_forbidden":
            name, known = str(location[-1]), _keys()
            hint = "" if name in known else closest(name, known)  # else it is a key of another section
            hint = hint or "; docs/config.md lists the keys of each section"
            raise ConfigError(f"{source}: unknown key {key!r}{hint}") from None
        if kind == "missing":
            raise ConfigError(f"{source}: key {key!r} is missing") from None
        given = "" if kind == "value_error" else f" (given: {error['input']!r})"
        raise ConfigError(f"{source}: {key + ': ' if key else ''}{message}{given}") from None


def of_this_version(
    raw: dict[str, Any], given: Container[str] | None, model: type[BaseModel] = Settings
) -> dict[str, Any]:
    """A resolved file without the keys that `model` lacks now and that had their default then."""
    if given is not None:
        try:
            model.model_validate(raw)
        except ValidationError as errors:
            for error in errors.errors():
                *parents, key = error["loc"]
                if error["type"] == "extra_forbidden" and ".".join(map(str, error["loc"])) not in given:
                    holder: Any = raw
                    for parent in parents:
                        holder = holder[parent]
                    del holder[key]
    return raw


def load_settings(
    path: Path, overrides: Iterable[str] = (), model: str | None = None, name: str | None = None
) -> Settings:
    """Read a YAML file and apply overrides `section.key=value`; see `with_overrides`.

    With `name` they apply to a copy of the model with this name. Raises ConfigError for an
    unreadable file, an unknown key or model, a name that is taken, or an override without `=`.
    """
    raw = of_this_version(read_yaml(path), given_in(path))
    models = raw.get("models") or {}
    if model is not None and model not in models:
        hint = closest(model, models)
        raise ConfigError(f"{path}: no model {model!r} under models{hint}; it has {', '.join(models) or 'none'}")
    if name is not None:
        if name in models:
            raise ConfigError(f"{path}: has a model {name!r}; train it with --model {name}, or choose another --name")
        raw, model = {**raw, "models": {**models, name: models[model]}}, name
    return validate(with_overrides(raw, overrides, model), str(path))


def settings_text(settings: Settings) -> str:
    """The settings as YAML with every default; `load_settings` reads them back unchanged."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    given = settings.model_dump(mode="json", exclude_defaults=True)
    return f"{text}{_GIVEN}{json.dumps([*names(given)])}\n"


def given_in(path: Path) -> set[str] | None:
    """The keys that differ from their default, as a resolved file names them; None for another."""
    last = path.read_text(encoding="utf-8-sig").rstrip().rpartition("\n")[2]
    with suppress(ValueError):  # cut short
        return set(json.loads(last.removeprefix(_GIVEN))) if last.startswith(_GIVEN) else None
    return None


def write_settings(settings: Settings, path: Path) -> None:
    """Write the resolved configuration, unless the file has the same text already."""
    text = settings_text(settings)
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)


def describe(section: type[Section] = Settings, prefix: str = "") -> str:
    """The configuration reference as Markdown, from the settings models."""
    tables: list[str] = []
    rows: list[str] = []
    for name, field in section.model_fields.items():
        annotation = Experiment if name == "models" else field.annotation
        key = f"{prefix}{name}" + (".NAME" if name == "models" else "")
        if isinstance(annotation, type) and issubclass(annotation, Section):
            tables.append(describe(annotation, f"{key}."))
            continue
        default = "required" if field.is_required() else f"`{field.default!r}`"
        rows.append(f"| `{key}` | {default} | {' '.join((field.description or '').split())} |")
    title = prefix.rstrip(".") or "Top level"
    head = f"## {title}\n\n{' '.join((section.__doc__ or '').split())}\n\n"
    body = "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n\n" if rows else ""
    return head + body + "".join(tables)


if __name__ == "__main__":
    print("# Configuration\n\nGenerated by `python -m common.config > docs/config.md`.\n\n" + describe().rstrip())
