"""Build the documentation site from the pages of this repository, without network: `make docs`.

Pages stay where they are: plain Markdown whose relative links also work on a forge. This script copies the pages of the
navigation and everything that they link to into build/docs/pages, under the same paths, and lets Zensical build
build/docs/site from there. A link to a folder becomes one to a page that lists its files.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "docs"
PAGES, SITE = BUILD / "pages", BUILD / "site"
SHIM = Path(__file__).with_name("iframe-worker-1.0.4.js")
REMOTE_SHIM = "https://unpkg.com/iframe-worker/shim"
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
"""A relative link, with its anchor and the closing bracket."""
BAR_IN_CODE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code in a cell of a table with an escaped bar: a forge shows the bar, Python-Markdown the backslash too."""


class _NavigationLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a function is named that only the build calls."""


_NavigationLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def pages_of_navigation() -> list[str]:
    """Return the paths of all pages in the navigation, relative to the repository."""

    def paths(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict | list):
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from paths(part)

    return list(paths(yaml.load((ROOT / "mkdocs.yml").read_text(), _NavigationLoader)["nav"]))


def links(text: str) -> set[str]:
    """Return the targets of a page's relative links, without anchors."""
    return {match[1] for match in LINK.finditer(FENCED.sub("", text))}


def stage() -> None:
    """Copy pages and what they link to, at first those of the navigation, until nothing is missing."""
    shutil.rmtree(PAGES, ignore_errors=True)
    waiting = [PurePosixPath(path) for path in pages_of_navigation()]
    staged: set[PurePosixPath] = set()
    while waiting:
        path = waiting.pop()
        if path in staged:
            continue
        staged.add(path)
        if (ROOT / path).is_dir():
            waiting += _write_listing(path)
            continue
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            waiting += _write_page(path)
        else:
            shutil.copyfile(ROOT / path, PAGES / path)


def _write_page(path: PurePosixPath) -> list[PurePosixPath]:
    """Write a page with its links to folders led to their listings; return what it links to."""
    text = (ROOT / path).read_text()

    def led(link: re.Match[str]) -> str:
        is_folder = (ROOT / path.parent / link[1]).is_dir()
        return f"{link[1].rstrip('/')}/index.md{link[2]}" if is_folder else link[0]

    (PAGES / path).write_text(BAR_IN_CODE.sub(_as_html, LINK.sub(led, text)))
    return [PurePosixPath(os.path.normpath(path.parent / link)) for link in links(text)]


def _as_html(code: re.Match[str]) -> str:
    shown = html.escape(code[1].replace("\\|", "|")).replace("|", "&#124;")
    return f"<code>{shown}</code>"


def _write_listing(folder: PurePosixPath) -> list[PurePosixPath]:
    """Write the page that lists a folder's files; return their paths."""
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    names = [path.relative_to(ROOT / folder).as_posix() for path in files]
    target = PAGES / folder / "index.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join([f"# {folder}\n", *(f"- [{name}]({name})" for name in names)]) + "\n")
    return [folder / name for name in names]


def keep_within_the_site() -> None:
    """Replace the one script that the theme loads from another host, without which files cannot be searched."""
    shutil.copyfile(SHIM, SITE / "assets" / SHIM.name)
    for page in SITE.rglob("*.html"):
        here = os.path.relpath(SITE / "assets" / SHIM.name, page.parent)
        page.write_text(page.read_text().replace(REMOTE_SHIM, here))


def main() -> int:
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "mkdocs.yml"]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode == 0:
        keep_within_the_site()
        print(f"open {SITE.relative_to(ROOT) / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
