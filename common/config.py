"""Reading the configuration: YAML to validated Settings, resolved settings back to YAML, and the reference page.

    settings = load_settings(Path("config.yaml"))
    settings.scrape.concurrency

Unknown keys, wrong types and contradictions raise ConfigError in one line with the key's full path.
`python -m common.config > docs/config.md` writes the reference from the models' docstrings.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from common.errors import ConfigError
from common.files import write_text
from common.settings import ModelRun, Section, Settings, closest


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Names that are allowed in the section at `location`."""
    section: Any = Settings
    for part in location:
        if section is Settings and part == "models":
            section = {"": ModelRun}
        elif isinstance(section, dict):
            section = section[""]
        elif isinstance(part, int):  # an entry of a list
            section = get_args(section)[0]
        elif isinstance(part, str) and part in getattr(section, "model_fields", {}):
            section = section.model_fields[part].annotation
    return list(getattr(section, "model_fields", {}))


def validate(raw: object, source: str) -> Settings:
    """Plain data (a parsed YAML file, Snakemake's `config`) as Settings; `source` names it in errors."""
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
        message = error["msg"].removeprefix("Value error, ")
        given = "" if error["type"] == "value_error" else f" (given: {error['input']!r})"
        raise ConfigError(f"{source}: {key + ': ' if key else ''}{message}{given}") from None


def load_settings(path: Path, overrides: Iterable[str] = (), model: str | None = None) -> Settings:
    """Read a YAML file; `overrides` are `section.key=value`, under `models.<model>` where one is named.

    Raises ConfigError for a missing file, YAML that does not parse, an unknown key, or an override with no `=`.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if raw is None:
        raise ConfigError(f"{path}: empty configuration file")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r} must read section.key=value")
        parts = [*(("models", model) if model else ()), *key.split(".")]
        target = raw
        for part in parts[:-1]:
            target = target.setdefault(part, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise ConfigError(f"override {override!r}: no such section")
        target[parts[-1]] = yaml.safe_load(value)
    settings = validate(raw, str(path))
    if model is not None and model not in settings.models:
        raise ConfigError(f"{path}: no model {model!r} under models{closest(model, settings.models)}")
    return settings


def step_settings(path: Path | None) -> Settings:
    """Settings for one step on its own: those of `--config FILE`, or every default."""
    return load_settings(path) if path is not None else Settings(run=Path("results"), urls=["-"])


def write_settings(settings: Settings, path: Path) -> None:
    """Write the resolved configuration, every default spelled out; an equal file is left untouched."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def settings_for_workflow(config: Mapping[str, Any], files: Iterable[object]) -> Settings:
    """Snakemake's merged `config` as Settings, written resolved to RUN/config.yaml, where every step reads it.

    `files` are the configuration files it came from. Raises ConfigError, also for a URL list that is not there.
    """
    source = ", ".join(map(str, files)) or "--config"
    settings = validate(config, source)
    try:
        settings.url_files()
        settings.source_files()
        settings.evaluation_files()
        settings.check_datasets()
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    write_settings(settings, settings.run / "config.yaml")
    return settings


def describe(section: type[Section] = Settings, prefix: str = "") -> str:
    """The configuration reference as Markdown, from the models above."""
    tables: list[str] = []
    rows: list[str] = []
    for name, field in section.model_fields.items():
        annotation = ModelRun if name == "models" else field.annotation
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
