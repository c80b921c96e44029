"""Parts of an HTML page without any external file: escaped text, tables, pictures as data, and safe writing."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["escape", "page", "picture", "table", "write_file"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere } th { text-align: left }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; white-space: pre-wrap } img { width: 100%; max-width: 54em }
.note { color: #666 }
"""


def escape(text: object) -> str:
    """Return text for use in HTML, with control characters replaced: they could hide or reverse parts of it."""
    return html.escape(_CONTROL.sub("�", str(text)))


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a table; all cells are escaped."""
    # Escaping happens here, in one place, and not in the callers.
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def picture(svg: bytes, title: str) -> str:
    """Return an image that contains the drawing itself. As an image it cannot run scripts."""
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page; `parts` are HTML already."""
    # The policy makes a browser refuse all network access, even if some text was not escaped.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" '
        f'content="{policy}">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def write_file(path: Path, text: str) -> None:
    """Replace a file as a whole: readers see the old or the new content, and a symbolic link is replaced itself."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of an earlier process with the same number
    # O_EXCL also refuses a symbolic link that someone else put there.
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
