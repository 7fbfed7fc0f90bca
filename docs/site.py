"""Prepare the repository's Markdown for the documentation site: a hook of MkDocs, which `mkdocs.yml` names.

Pages are written for a reader of the repository. They link to files outside docs/, and write formulas as GitHub does.
The hook adds README.md, CONTRIBUTING.md and CHANGELOG.md as pages, copies each linked file into the site, and turns
formulas into MathML. Python-Markdown wants four spaces before what belongs to a list's item, and has them here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Where the site has a page of the root.
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# The tabs of the site, in order.
TABS = ("index.md", "Tutorials", "How to", "Reference", "Explanation", "contributing.md", "changelog.md")
# Where the site has any other file of the repository.
COPIED = "repository"

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"\$`([^`]+)`\$")
_ITEM = re.compile(r"^ {3}(?=\S)", re.MULTILINE)
_FOLDER = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)\)")
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and every file outside docs/ that a page links to."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for page in [*files.documentation_pages()]:
        for _, path, _ in _LINK.findall(page.content_string):
            target = _target(path, page.src_uri)
            if target is not None and not target.startswith("docs/") and target not in ROOT_PAGES:
                copy = f"{COPIED}/{target}"
                if (ROOT / target).is_file() and files.get_file_from_path(copy) is None:
                    files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Sort the tabs: what a reader tries first comes first."""
    nav.items.sort(key=lambda item: TABS.index(item.file.src_uri if isinstance(item, Page) else item.title or ""))
    for item in nav.items:
        for part in item.children or ():
            # A page has its title once it is read; setting None here would stay.
            if part.title == "Api":
                part.title = "API"
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has their files, and convert formulas."""
    source = page.file.src_uri
    parts, end = [], 0
    for fence in _FENCED.finditer(markdown):
        parts += [_prose(markdown[end : fence.start()], source), _fence(fence)]
        end = fence.end()
    return "".join([*parts, _prose(markdown[end:], source)])


def _prose(text: str, source: str) -> str:
    def relink(found: re.Match[str]) -> str:
        target = _target(found[2], source)
        if target is None:
            return found[0]
        if target.startswith("docs/"):
            place = target.removeprefix("docs/")
        else:
            place = ROOT_PAGES.get(target, f"{COPIED}/{target}")
        return f"{found[1]}{posixpath.relpath(place, posixpath.dirname(source) or '.')}{found[3]}"

    def unlink(found: re.Match[str]) -> str:
        # The site has files of the repository, and no lists of its folders.
        target = _target(found[2], source)
        return found[1] if target is not None and (ROOT / target).is_dir() else found[0]

    # A line that starts with a formula is a block of HTML unless the formula is in a span.
    text = _FORMULA.sub(lambda found: f"<span>{convert(found[1])}</span>", _ITEM.sub(" " * 4, text))
    return _LINK.sub(relink, _FOLDER.sub(unlink, text))


def _fence(found: re.Match[str]) -> str:
    if found[2] != "math":
        return re.sub(r"^(?=.)", " ", found[0], flags=re.MULTILINE) if found[1] == " " * 3 else found[0]
    # A narrow screen scrolls a long formula.
    return f'<div style="overflow-x: auto">{convert(found[3].strip(), display="block")}</div>'


def _target(path: str, source: str) -> str | None:
    """Return the file of the repository that a page's link leads to, or None for a link that leads elsewhere."""
    if "://" in path or path.startswith("mailto:"):
        return None
    of = next((name for name, page in ROOT_PAGES.items() if page == source), f"docs/{source}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(of), path))
