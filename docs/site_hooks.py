"""Pages of the site from outside docs/: README, CONTRIBUTING, CHANGELOG, the API reference.

mkdocs calls these functions (`hooks` in mkdocs.yml). They rewrite links that are written for
GitHub.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FILES = ("LICENSE", "CITATION.cff")
PACKAGES = ("common", "corpus", "training", "convert", "cluster", "workflow", "benchmarks")

_LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
_UNTITLED = "\n    options:\n      show_root_heading: false"  # the page has this title


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and their entries in the menu."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_links_from_root(text)))
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    reference = api_pages()
    for package, modules in reference.items():
        blocks = [f"::: {module}" + (_UNTITLED if module == package else "") for module in modules]
        text = "\n\n".join([f"# {package}", *blocks])
        files.append(File.generated(config, f"reference/{package}.md", content=text + "\n"))
    _fill_menu(config, sorted(reference))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Point links such as `../CONTRIBUTING.md` to the site's pages."""
    for source, name in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Raises PluginError if a page loads something from another address."""
    loaded = _LOADED.search(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri}: loads {loaded[1]}; a reader's browser must not connect to anything")
    return output


def api_pages() -> dict[str, list[str]]:
    """The modules of every package and sub-package, by its name."""
    pages: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            pages.setdefault(".".join(parts[:-1]), []).append(".".join(parts).removesuffix(".__init__"))
    return pages


def _links_from_root(text: str) -> str:
    """A page of the repository's root, as a page of docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for source, name in PAGES.items():
        text = text.replace(f"]({source}", f"]({name}")
    return text


def _fill_menu(config: MkDocsConfig, titles: list[str]) -> None:
    """Put the generated pages where the menu says `API`."""
    for section in config.nav or []:
        for entry in section.get("Reference", []):
            if isinstance(entry, dict):
                entry["API"] = [{title: f"reference/{title}.md"} for title in titles]
