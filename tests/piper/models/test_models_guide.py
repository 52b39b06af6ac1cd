"""docs/models.md: its tables are what the code says (renew: pytest --update-golden), its example works."""

import ast
import inspect
import json
import re
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from piper.models import ARCHITECTURES, CATALOGUE, MODELS, find_model
from piper.models import shape as shapes
from piper.models.entries import read_entry
from piper.models.published import read_published
from piper.models.reading.config import read_shape

GUIDE = Path(__file__).parents[3] / "docs/models.md"

PARTS = (
    shapes.Layer, shapes.Attention, shapes.LatentAttention, shapes.Rotary, shapes.RopeScaling,
    shapes.FeedForward, shapes.SparseMoE, shapes.Router, shapes.Norm, shapes.Embedding, shapes.Head,
)  # fmt: skip


def families():
    """One line for each reader: the classes that it reads, and what the file says of itself."""
    lines = ["| family | read from | what it is |", "|---|---|---|"]
    of_reader = {}
    for family, entry in MODELS.items():
        of_reader.setdefault(entry.reader.partition(":")[0], []).append(family)
    for module, names in of_reader.items():
        classes = [name for name, family in ARCHITECTURES.items() if family in names and name[0].isupper()]
        path = Path(__file__).parents[3] / (module.replace(".", "/") + ".py")
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        about = docstring.split("\n\n")[0].replace("\n", " ")
        lines.append(f"| {', '.join(f'`{n}`' for n in names)} | {', '.join(classes)} | {about} |")
    return "\n".join(lines)


def described(part):
    """Return (fields, sentence) of each entry of a dataclass's `Args:`, and of each field that has none."""
    text = textwrap.dedent(inspect.getdoc(part).partition("Args:\n")[2])
    found = []
    for entry in re.split(r"\n(?=\w[\w, ]*:)", text):
        names, _, about = entry.partition(":")
        found.append(([name.strip() for name in names.split(",")], " ".join(about.split())))
    told = {name for names, _ in found for name in names}
    return found + [([field.name], "") for field in fields(part) if field.name not in told]


def parts():
    lines = []
    for part in PARTS:
        defaults = {field.name: field.default for field in fields(part)}
        lines += [f"**{part.__name__}**: {inspect.getdoc(part).splitlines()[0]}", ""]
        lines += ["| field | left out | says |", "|---|---|---|"]
        for names, about in described(part):
            left_out = dict.fromkeys(
                "must be there" if defaults[name] is MISSING else f"`{json.dumps(defaults[name])}`"
                for name in names
            )
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {shown} | {', '.join(left_out)} | {about} |")
        lines.append("")
    return "\n".join(lines).strip()


def number(value):
    return f"{value:,}" if isinstance(value, int) else value


def catalogue():
    lines = [
        "| name | parameters | published | active | published | source |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name in CATALOGUE:
        source, published = find_model(name), read_published(read_entry(name))
        active = source.facts.n_active_parameters
        row = [name, number(source.n_parameters)]
        row.append("" if published is None else number(published.parameters))
        row.append("" if active == source.n_parameters else number(active))
        row.append("" if published is None or published.active is None else number(published.active))
        where = source.origin if published is None else published.source
        row.append(where + (f" ({published.why})" if published is not None and published.why else ""))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


TABLES = {"families": families, "fields": parts, "catalogue": catalogue}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_says(name, request):
    text = GUIDE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    shown, after = rest.split(end)
    expected = TABLES[name]() + "\n"
    if request.config.getoption("--update-golden"):
        GUIDE.write_text(before + begin + expected + end + after, encoding="utf-8")
        return
    assert shown == expected


def test_the_example_is_a_model():
    text = GUIDE.read_text(encoding="utf-8").split("<!-- example: begin -->")[1].split("<!-- example")[0]
    shape = read_shape(json.loads(text.replace("```json", "").replace("```", "")), where="guide")
    assert len(shape.layers) == 24
    assert shape.layers[2] == shape.layers[23] != shape.layers[0]
    assert shape.n_active_parameters < shape.n_parameters
