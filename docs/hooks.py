"""MkDocs hooks: the site gets a page for each file outside docs/ that a page links to, and the tutorial's notebook.

A picture that has a narrow form, NAME-narrow, is shown in it where a window is narrow.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from notebook import notebook_of

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()[^)#\s:]+")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
# Windows in which the page has room for a picture of 360 pixels, and none for twice that.
NARROW = "(max-width: 44.9375em)"
NOTEBOOK = "tutorial.ipynb"
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".json": "json"}

# {page on the site: path in the repository}
_sources: dict[str, str] = {}


def page_of(path: str) -> str:
    """Return the page on the site that shows a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    page = path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{page}/index.md"
    return page if path.startswith("docs/") or path.endswith(".md") else f"{page}.md"


def resolve(source: str, link: str) -> str | None:
    """Return the path in the repository of a link's target, or None if there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if (ROOT / path).exists() and not path.startswith("..") else None


def content_of(path: str) -> str:
    """Return the Markdown of a page outside docs/: the file itself, its text as code, or a list of a folder's pages."""
    file = ROOT / path
    if file.is_dir():
        titles = ((page.name, page.read_text().splitlines()[0].lstrip("# ")) for page in sorted(file.glob("*.md")))
        return f"# {file.name.upper()}\n\n" + "".join(f"- [{title}]({name})\n" for name, title in titles)
    if file.suffix == ".md":
        return file.read_text()
    hidden = "---\nsearch:\n  exclude: true\n---\n\n"
    return f"{hidden}# `{path}`\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page, and a page for each file outside docs/ that a page links to, and a notebook."""
    _sources.clear()
    _sources.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    waiting = ["README.md", *_sources.values()]
    while waiting:
        source = waiting.pop()
        page = page_of(source)
        if page not in files.src_uris:
            files.append(File.generated(config, page, content=content_of(source)))
            _sources[page] = source
        if source.endswith(".md"):
            found = (resolve(source, link) for link in LINK.findall((ROOT / source).read_text()))
            waiting += [path for path in found if path and page_of(path) not in files.src_uris]
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    files.append(File.generated(config, NOTEBOOK, content=json.dumps(notebook_of(tutorial, "train.py"), indent=1)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the repository into links between pages of the site, and give pictures two forms."""
    here = page.file.src_uri
    source = _sources[here]

    def on_site(link: re.Match[str]) -> str:
        path = resolve(source, link[0])
        return posixpath.relpath(page_of(path), posixpath.dirname(here)) if path else link[0]

    def in_two_forms(image: re.Match[str]) -> str:
        narrow = posixpath.join(posixpath.dirname(here), "{}-narrow{}".format(*posixpath.splitext(image[1])))
        if files.get_file_from_path(posixpath.normpath(narrow)) is None:
            return image[0]
        source = posixpath.relpath(narrow, posixpath.dirname(here))
        return f'<picture><source media="{NARROW}" srcset="{source}">{image[0]}</picture>'

    return IMAGE.sub(in_two_forms, LINK.sub(on_site, markdown)).replace(f"`{NOTEBOOK}`", f"[`{NOTEBOOK}`]({NOTEBOOK})")
