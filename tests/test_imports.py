"""No files import each other, directly or around a corner, wherever in a file the import stands."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_two_files_import_each_other() -> None:
    """Imports for type checking and those inside of functions count too."""
    graph = grimp.build_graph("normattn", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    assert len(imports) > 150
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
