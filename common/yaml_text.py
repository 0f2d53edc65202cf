"""Reads YAML with every value as text, so that the type of a key decides what its value means, not its look.

    read_yaml(Path("config.yaml"))["clean"]["language"]     # `no` is the language, never the boolean

Every plain value stays as written (`no`, `1:30`, `010`, `2024-01-01`); only null (`null`, `~`, nothing) becomes None.
The models of `common.settings` convert text to numbers and booleans as each key requires. A key that is given twice is
an error. The Snakefile uses this reader, too, because Snakemake's own takes `no` for False.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError

_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"


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
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join((error.problem or str(error)).split())
        hint = "; indent with spaces" if r"'\t'" in problem else ""
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    except ValueError as error:  # an explicit tag, such as `!!int x`
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if it is missing, empty, not UTF-8 or not YAML."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a YAML file") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None
    raw = _parse(text, str(path))
    if raw is None:
        raise ConfigError(f"{path}: empty configuration file")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, not {type(raw).__name__}")
    return raw


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with `more`, recursively. Copies, because YAML aliases share their sections."""
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def with_overrides(raw: Mapping[str, Any], overrides: Iterable[str], section: tuple[str, ...] = ()) -> dict[str, Any]:
    """`raw` with each `section.key=value` set, below `section`. Raises ConfigError for a malformed one."""
    result = dict(raw)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise ConfigError(f"override {override!r} must read section.key=value")
        value = _parse(text, f"override {override!r}")
        for key in reversed((*section, *name.split("."))):
            value = {key: value}
        assert isinstance(value, dict)
        result = merged(result, value)
    return result
