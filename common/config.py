"""Reads YAML into validated Settings, writes resolved settings back as YAML, and prints the reference page.

    settings = load_settings(Path("config.yaml"))
    settings.scrape.concurrency

Unknown keys, wrong types and contradictions raise ConfigError, one line with the key's full path.
`python -m common.config > docs/config.md` writes the reference page from the models' docstrings.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from common.errors import ConfigError
from common.files import write_text
from common.settings import Experiment, Section, Settings, closest
from common.yaml_text import read_yaml, with_overrides

JOB_SETTINGS = "URLS_TO_GPT2_SETTINGS"
"""Environment variable of a job of the workflow: path of the run's resolved settings."""
_WORDS = {
    "Input should": "must",
    "String should": "must",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid list": "a list",
    "a valid dictionary": "a mapping of keys",
    "a valid tuple": "two numbers, such as [0.9, 0.999]",
}
"""Pydantic's words, and ours."""
TOP_LEVEL = frozenset(Settings.model_fields) - frozenset(Experiment.model_fields)
"""What an override of a command with a model may name besides the model's own sections."""


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Names of the keys in the section at `location`."""
    section: Any = Settings
    for part in location:
        if section is Settings and part == "models":
            section = {"": Experiment}
        elif isinstance(section, dict):
            section = section[""]
        elif isinstance(part, int):  # an entry of a list
            section = get_args(section)[0]
        elif isinstance(part, str) and part in getattr(section, "model_fields", {}):
            section = section.model_fields[part].annotation
    return list(getattr(section, "model_fields", {}))


def validate(raw: object, source: str) -> Settings:
    """Settings from plain data (a parsed YAML file). Errors name `source`. Raises ConfigError."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: must be a mapping of keys, not {type(raw).__name__}")
    try:
        return Settings.model_validate(dict(raw))
    except ValidationError as errors:
        error = errors.errors()[0]
        location = error["loc"]
        key = ".".join(str(part) for part in location)
        if error["type"] == "extra_forbidden":
            hint = closest(str(location[-1]), _fields_at(location[:-1])) or "; docs/config.md lists the keys"
            raise ConfigError(f"{source}: unknown key {key!r}{hint}") from None
        if error["type"] == "missing":
            raise ConfigError(f"{source}: key {key!r} is missing") from None
        message = plain_words(error["msg"])
        value = error["input"]  # text is shown as written if that is one line
        plain = isinstance(value, str) and value.isprintable() and value.strip() == value != ""
        shown = value if plain else repr(value)
        given = "" if error["type"] == "value_error" else f" (given: {shown})"
        raise ConfigError(f"{source}: {key + ': ' if key else ''}{message}{given}") from None


def plain_words(message: str) -> str:
    """A message of pydantic's in plain words: `must be a whole number`."""
    message = re.sub(r", unable to (parse|interpret) .*| or instance of \w+", "", message.removeprefix("Value error, "))
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message


def load_settings(path: Path, overrides: Iterable[str] = (), model: str | None = None) -> Settings:
    """Read a YAML file and apply overrides `section.key=value`, of `models.<model>` too if a model is named.

    Raises ConfigError for a file that cannot be read, an unknown key or model, or an override without `=`.
    """
    raw = read_yaml(path)
    models = raw.get("models")
    if model is not None and isinstance(models, dict) and model not in models:
        hint = closest(model, models)
        raise ConfigError(f"{path}: no model {model!r} under models{hint}; it has {', '.join(models) or 'none'}")
    settings = validate(with_model_overrides(raw, overrides, model), str(path))
    if model is not None and model not in settings.models:
        raise ConfigError(f"{path}: no model {model!r} under models")
    return settings


def with_model_overrides(raw: Mapping[str, Any], overrides: Iterable[str], model: str | None) -> Mapping[str, Any]:
    """`raw` with each override set: `train.lr=1` below `models.<model>` if one is named, `cluster.gpu=h100` not."""
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        raw = with_overrides(raw, [override], ("models", model) if model and section not in TOP_LEVEL else ())
    return raw


def step_settings(path: Path | None, overrides: Sequence[str] = (), model: str | None = None) -> Settings:
    """The settings of one command: from `--config FILE` or all defaults, with overrides as in `load_settings`."""
    if path is not None:
        settings = load_settings(path, overrides, model)
        return settings.model_copy(update={"cluster": settings.cluster_of(model)}) if model else settings
    return validate(with_overrides({"run": "results", "urls": ["-"]}, overrides), "command line")


def settings_text(settings: Settings) -> str:
    """The resolved configuration as YAML with every default; `load_settings` reads it back unchanged."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def write_settings(settings: Settings, path: Path) -> None:
    """Write the resolved configuration, unless the file has the same text already."""
    text = settings_text(settings)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
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
