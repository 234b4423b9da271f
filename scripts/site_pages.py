"""Generate pages of the site: a hook of mkdocs (`mkdocs build --strict`).

It makes a page for each component and each study, the commands by their help, the interface by its
docstrings, and copies of files outside docs/ (readme, contributing, changelog, results) with
adapted links. Run as a script, it writes the table of component types into docs/scores.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normattn.cli.app import main
from normattn.cli.listing import describe, excluded
from normattn.lab.studies import COMMAND_STUDIES, find, names
from normattn.lab.studies import preset as presets
from normattn.lab.studies.base import Study
from normattn.score.parts import Part, Slot, parts

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- slots: begin (scripts/site_pages.py) -->", "<!-- slots: end -->"
PACKAGES = (
    *("score", "kernels", "layers", "models", "hf"),
    *("lab.training", "lab.runs", "lab.data", "lab.evaluation", "lab.diagnostics"),
    *("lab.stats", "lab.report", "lab.sweep"),
)
MODULES = ("score.parts", "layers.explain")
COMMANDS = (
    *("demo", "list", "train", "evaluate", "report", "reproduce", "reproduce keynorm"),
    *("extend", "verify", "score", "inspect", "generate", "export", "lm-eval"),
)
MOVED = {
    "adding-a-variant.md": "adding-a-component.md",
    "extend-stacks.md": "huggingface.md",
    "family-scores.md": "families.md",
    "usage.md": "train.md",
}
"""Pages that the changelog links by an old name."""


def on_config(config: Any) -> Any:
    """Add the generated pages to their sections of the navigation."""
    sections = {title: pages for entry in config.nav for title, pages in entry.items()}
    known = parts()
    by_slot = [
        {str(slot).capitalize(): [f"parts/{name}.md" for name in known if known[name].slot is slot]}
        for slot in Slot
    ]
    sections["Reference"] += [
        {"Components": ["parts/index.md", *by_slot]},
        {"Python modules": [f"reference/{name}.md" for name in interface()]},
    ]
    sections["Results"].append({"Study by study": [f"study/{name}.md" for name in studies()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, figures and copies."""
    from mkdocs.structure.files import File

    generated = (command_page(), *kept_pages(), *part_pages(), *study_pages(), *interface_pages())
    for uri, content in generated:
        files.append(File.generated(config, uri, content=content))
    for path in sorted((ROOT / "results").rglob("*.png")):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links of guides to results/, which is next to them on the site."""
    return (
        re.sub(r"\]\(\.\./(results/|development/|C[A-Z]+\.md)", r"](\1", markdown)
        if ("/" not in page.file.src_uri)
        else markdown
    )


def kept_pages() -> Iterator[tuple[str, str]]:
    """Copies of pages outside docs/, with adapted links."""
    for name in ("README.md", "CONTRIBUTING.md", "development/log.md", "CHANGELOG.md"):
        path = ROOT / name
        text = path.read_text("utf-8").replace("](docs/", "](")
        for old, new in MOVED.items():
            text = text.replace(f"]({old}", f"]({new}")
        text = re.sub(r"\[([^]]*)\]\(((?:results/)?[\w.-]+\.(?:json|cff))\)", r"\1", text)
        yield ("index.md" if name == "README.md" else name), text
    for path in sorted((ROOT / "results").rglob("*.md")):
        text = re.sub(
            r"\[([^]]*)\]\([^)]*\.(?:csv|json|svg|txt|html|parquet)\)",
            r"\1",
            path.read_text("utf-8"),
        )
        yield path.relative_to(ROOT).as_posix(), text


def command_page() -> tuple[str, str]:
    """The `--help` of every command."""
    lines = ["# Which commands and options are there?", ""]
    lines += ["Every command explains itself with `--help`. This page is what they print.", ""]
    for name in ("", *COMMANDS):
        lines += [f"## normattn {name}".rstrip(), "", "```text", _help(name), "```", ""]
    return "cli.md", "\n".join(lines)


def _help(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    text = re.sub(r"\bUsage: (python -m )?\S+", "Usage: normattn", printed.getvalue().strip())
    return "\n".join(line.rstrip() for line in text.splitlines())


def slot_table() -> str:
    """The table of slots in docs/scores.md: what each decides, and its components."""
    lines = [
        f"A name has at most one component of each of {len(Slot)} types, in this order.",
        "",
        "| type | decides | components |",
        "| --- | --- | --- |",
    ]
    for slot in Slot:
        names = ", ".join(f"`{name}`" for name, part in parts().items() if part.slot is slot)
        lines.append(f"| {slot} | {slot.meaning} | {names} |")
    return "\n".join(lines)


def with_slot_table(page: str) -> str:
    """The page with a new table between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{slot_table()}\n{END}{rest.split(END)[1]}"


def part_pages() -> Iterator[tuple[str, str | bytes]]:
    """A page and a figure for each part, and the index of all."""
    sys.path.insert(0, str(Path(__file__).parent))  # mkdocs takes the folder of a hook away again
    import part_figures

    yield "parts/index.md", _index()
    for name, part in parts().items():
        image, caption = part_figures.figure(name)
        yield f"parts/figures/{name}.png", image
        yield f"parts/{name}.md", _part_page(name, part, caption)


def _index() -> str:
    lines = ["# Components of a score", "", "One page each, generated from the registry.", ""]
    for slot in Slot:
        lines += [f"## {str(slot).capitalize()}", "", f"{slot.meaning}.", ""]
        lines += ["| component | equation | when |", "| --- | --- | --- |"]
        for name, part in parts().items():
            if part.slot is slot:
                equation = part.equation.replace("|", "\\|")
                lines.append(f"| [{name}]({name}.md) | `{equation}` | {_when(part)} |")
        lines.append("")
    return "\n".join(lines)


def _part_page(name: str, part: type[Part], caption: str) -> str:
    entry = describe(name, part)
    lines = [f"# {name}", "", f"{_sentence(part.summary)}", ""]
    lines += ["```text", part.equation, "```", ""]
    lines += [f"- **Source:** {_linked(part.source)}", f"- **When:** {_when(part)}"]
    lines += [
        f"- **Type:** [{part.slot}](index.md#{part.slot.replace(' ', '-')}): {part.slot.meaning}"
    ]
    if part.used_by:
        lines.append(f"- **Used by:** {part.used_by}")
    if entry["attention"] != "either":
        lines.append(f"- **Attention:** {entry['attention']} only")
    if name != part.__name__:
        lines.append(f"- **Class:** `{part.__module__}.{part.__name__}`")
    lines += ["", f"![{caption}](figures/{name}.png)", "", f"*{caption}*", ""]
    lines += _docstring(part)
    lines += _parameters(entry) + _exclusions(entry) + _kernels(entry)
    return "\n".join(lines)


def _when(part: type[Part]) -> str:
    return part.when


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def _docstring(part: type[Part]) -> list[str]:
    """A component's docstring without its first line, which is the summary."""
    import inspect

    text = (inspect.getdoc(part) or "").partition("\n")[2].strip()
    return ["```text", text, "```", ""] if text else []


def _linked(source: str) -> str:
    source = re.sub(r"(?<![\w./])(\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", source)
    return re.sub(r"(?<!\w)(kexue\.fm/archives/\d+)", r"[\1](https://\1)", source)


def _parameters(entry: dict[str, Any]) -> list[str]:
    if not entry["parameters"]:
        return []
    lines = [
        "## Parameters",
        "",
        "| name | default | at L = 512, factor 8 |",
        "| --- | --- | --- |",
    ]
    for parameter in entry["parameters"]:
        default = "filled in" if parameter["default"] is None else f"`{parameter['default']}`"
        lines.append(f"| `{parameter['name']}` | {default} | `{parameter['example']}` |")
    return [*lines, ""]


def _exclusions(entry: dict[str, Any]) -> list[str]:
    lines = ["## Cannot be combined with", ""]
    for others, reason in excluded(entry["excludes"]):
        linked = ", ".join(f"[{name}]({name}.md)" for name in others)
        lines.append(f"- {linked}: {reason}")
    if entry["beside_rope"]:
        linked = ", ".join(f"[{name}]({name}.md)" for name in entry["beside_rope"])
        lines.append(f"- only if RoPE is named as well: {linked}")
    if len(lines) == 2:
        lines.append("Nothing: it works with every component of another type.")
    return [*lines, ""]


def _kernels(entry: dict[str, Any]) -> list[str]:
    lines = ["## Kernel", "", "For the smallest score with this component, 2,048 tokens:", ""]
    lines += ["| device | kernel |", "| --- | --- |"]
    return [
        *lines,
        *(f"| {device} | {kernel} |" for device, kernel in entry["kernels"].items()),
        "",
    ]


def studies() -> dict[str, Study]:
    """All studies by name, including those that commands measure."""
    return {name: find(name) for name in (*names(), *COMMAND_STUDIES)}


def study_pages() -> Iterator[tuple[str, str]]:
    """A page for each study: question, rows, command lines, contents of its report."""
    for name, study in studies().items():
        yield f"study/{name}.md", "\n".join(_study_page(name, study))


def _study_page(name: str, study: Study) -> list[str]:
    lines = [f"# {name}", "", study.page.question, "", study.help, ""]
    if study.page.sources:
        lines.append(f"- **Sources:** {', '.join(map(_linked, study.page.sources))}")
    if study.variants:
        lines.append(f"- **Configurations:** {study.variants}")
    if study.methods:
        lines.append(f"- **Methods:** {study.methods}")
    lines += [*_presets(name, study), "", "```bash"]
    if study.made_by:
        lines.append(study.made_by)
    else:
        examples = study.examples or (("", "the study itself"),)
        lines += [f"normattn reproduce {name} {line}  # {does}" for line, does in examples]
    return [*lines, "```", "", *_shown(study), *_published(name)]


def _presets(name: str, study: Study) -> list[str]:
    if study.made_by:
        return []
    own = (ROOT / "src" / "normattn" / "lab" / "studies" / "presets" / name).is_dir()
    known = presets.names(name if own else None)
    return [f"- **Presets:** {', '.join(f'`{preset}`' for preset in known)}"]


def _shown(study: Study) -> list[str]:
    """The study's tables, with the notes that do not depend on measurements."""
    lines = ["## What its report shows", ""]
    for table in study.page.tables:
        title = table.title or "One row for each " + table.head
        end = "" if title.endswith("?") else "."
        lines += [f"**{title[0].upper()}{title[1:].rstrip('.')}{end}** {table.intro}".strip(), ""]
        notes = () if callable(table.notes) else table.notes
        lines += [*(f"- {note}" for note in notes), ""]
    return lines


def _published(name: str) -> list[str]:
    """Links to the study's published results, with a figure of each."""
    lines = []
    for folder in sorted((ROOT / "results").glob(f"{name}-*")):
        tables = sorted(folder.glob("*.md"), key=lambda path: (path.stem != "table", path.stem))
        tables = [path for path in tables if path.name != "README.md"] or tables
        address = f"../{folder.relative_to(ROOT).as_posix()}"
        lines += [f"[{folder.name}]({address}/{tables[0].name})", ""]
        figures = sorted((folder / "figures").glob("*.png"))
        if figures:
            caption = figures[0].stem.replace("_", " ")
            lines += [f"![{caption}]({address}/figures/{figures[0].name})", ""]
    return ["## Published results", "", *lines] if lines else []


def interface() -> list[str]:
    """The packages and modules whose docstrings become pages, if they exist."""
    wanted = (*PACKAGES, *MODULES)
    return [name for name in wanted if importlib.util.find_spec(f"normattn.{name}") is not None]


def interface_pages() -> Iterator[tuple[str, str]]:
    """A `mkdocstrings` page for each package or module."""
    for name in interface():
        yield f"reference/{name}.md", f"# normattn.{name}\n\n::: normattn.{name}\n"


if __name__ == "__main__":
    page = ROOT / "docs" / "scores.md"
    page.write_text(with_slot_table(page.read_text("utf-8")), "utf-8")
