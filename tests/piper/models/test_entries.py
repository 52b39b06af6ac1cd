"""Entries of the catalogue come from an index that is exactly what their files say."""

import json
import subprocess
import sys

import pytest

from piper.models import CATALOGUE, entries
from piper.models.entries import FOLDER, INDEX, digest, parse_entry, read_entry


def indexed():
    files = {name: (FOLDER / file).read_bytes() for name, file in CATALOGUE.items()}
    return {name: {"sha256": digest(text), "entry": parse_entry(text)} for name, text in files.items()}


def test_the_index_is_what_the_files_say(request):
    text = json.dumps(indexed(), indent=0, ensure_ascii=False) + "\n"
    if request.config.getoption("--update-golden"):
        INDEX.write_text(text, encoding="utf-8")
    assert INDEX.read_text(encoding="utf-8") == text, "run pytest --update-golden"


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """One file differs from what the index knows, a second one is not in it."""
    for name in ("tiny-llama", "tiny-moe"):
        text = (FOLDER / CATALOGUE[name]).read_text().replace("vocab_size: 256", "vocab_size: 512")
        (tmp_path / CATALOGUE[name]).write_text(text)
    (tmp_path / "index.json").write_text(json.dumps({"tiny-llama": indexed()["tiny-llama"]}))
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    monkeypatch.setattr(entries, "INDEX", tmp_path / "index.json")
    caches = (read_entry, entries._index)
    for kept in caches:
        kept.cache_clear()
    yield tmp_path
    for kept in caches:
        kept.cache_clear()


@pytest.mark.usefixtures("changed")
def test_a_file_that_has_changed_since_is_read_itself():
    assert read_entry("tiny-llama")["config"]["vocab_size"] == 512


@pytest.mark.usefixtures("changed")
def test_a_file_that_the_index_does_not_know_is_read_itself():
    assert read_entry("tiny-moe")["config"]["vocab_size"] == 512


def test_without_an_index_all_files_are_read(changed):
    (changed / "index.json").unlink()
    assert read_entry("tiny-llama")["config"]["vocab_size"] == 512


def test_listing_models_loads_neither_yaml_nor_torch():
    code = (
        "import sys; from piper.models import CATALOGUE, find_model;"
        "[find_model(name) for name in CATALOGUE]; find_model('GPT 145.6B');"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'ruamel.yaml')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
