"""Metadata hook of hatchling (`python -m build`): the README as the package's page.

A package's page does not have the repository's files, to which the README links. With
NORMATTN_REPOSITORY=https://github.com/OWNER/NAME, links and images point to this version's files
there, and [project.urls] is filled. Without it, images are left out and links become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"^!\[([^]]*)\]\((?!https?:)([^)]+)\)\n*", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")


class PackagePage(MetadataHookInterface):
    """Fills `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the project table."""
        address = os.environ.get("NORMATTN_REPOSITORY", "").rstrip("/")
        version = re.search(
            r'^__version__ = "(.+)"$',
            Path(self.root, "src/normattn/__init__.py").read_text("utf-8"),
            re.MULTILINE,
        )
        assert version is not None
        text = Path(self.root, "README.md").read_text("utf-8")
        page = package_page(text, address, f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
        metadata["urls"] = project_urls(address, f"v{version[1]}")


def package_page(readme: str, address: str, tag: str) -> str:
    """The README with absolute links; without an address, with neither links nor images."""
    if not address:
        return _LINK.sub(r"\1", _IMAGE.sub("", readme))
    shown = _IMAGE.sub(rf"![\1]({address}/raw/{tag}/\2)\n\n", readme)
    return _LINK.sub(rf"[\1]({address}/blob/{tag}/\2)", shown)


def project_urls(address: str, tag: str) -> dict[str, str]:
    """[project.urls] of a repository on GitHub; empty without an address."""
    if not address:
        return {}
    return {
        "Repository": address,
        "Documentation": f"{address}/tree/{tag}/docs",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
