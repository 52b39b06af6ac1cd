"""Files of the user: what they hold, and how each way of being broken is told."""

import gzip

import pytest

from cost_models.documents import (
    UnreadableError,
    exists,
    is_file,
    is_folder,
    parse_json,
    parse_yaml,
    read_bytes,
    read_head,
    read_text,
)

BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))


def problem(function, argument):
    with pytest.raises(UnreadableError) as caught:
        function(argument)
    return caught.value


def test_text_is_read_plain_compressed_or_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "any name"
    for data in (b"[1]", gzip.compress(b"[1]", mtime=0), b"\xef\xbb\xbf[1]"):
        file.write_bytes(data)
        assert read_text(file) == "[1]"


def test_the_head_of_a_compressed_file_is_that_of_its_text(tmp_path):
    file = tmp_path / "plan"
    file.write_bytes(gzip.compress(b"0123456789" * 1000, mtime=0))
    assert read_head(file, 5) == b"01234"
    assert len(read_bytes(file)) == 10_000


def test_a_missing_file_is_told_apart(tmp_path):
    found = problem(read_bytes, tmp_path / "none")
    assert found.missing
    assert found.rule == "does not exist"


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"\x1f\x8b", "begins as gzip"),
        (gzip.compress(b"x" * 1000, mtime=0)[:20], "begins as gzip"),
        (gzip.compress(b"x" * 1000, mtime=0)[:12] + b"\xff" * 30, "begins as gzip"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_told(tmp_path, data, rule):
    file = tmp_path / "file"
    file.write_bytes(data)
    found = problem(read_text, file)
    assert rule in found.rule
    assert not found.missing


def test_a_folder_is_no_file(tmp_path):
    assert problem(read_bytes, tmp_path).rule == "cannot be read: Is a directory"


@pytest.mark.parametrize("name", ["nul\0byte", "x" * 5000, "surrogate\ud800"])
def test_a_name_that_no_file_can_have_is_not_there(tmp_path, name):
    path = tmp_path / name
    assert not exists(path)
    assert not is_file(path)
    assert not is_folder(path)
    assert problem(read_bytes, path).rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ("9" * 5000, "is not valid JSON: Exceeds the limit"),
        ('{"pp": 1, "pp": 2}', "is not valid JSON: the key 'pp' is given twice"),
    ],
)
def test_json_that_python_alone_would_choke_on_is_told(text, rule):
    assert rule in problem(parse_json, text).rule


def test_broken_json_has_a_place():
    found = problem(parse_json, '{\n "a": oops}')
    assert found.place("s.json") == "s.json:2:7"
    assert found.rule == "is not valid JSON: Expecting value"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[" * 5000, "is nested too deeply"),
        ("a: 2020-99-99", "has a value that is not YAML"),
        ("a: " + "9" * 5000, "has a value that is not YAML"),
        ("&a [*a]", "by aliases of aliases"),
        (BOMB, "by aliases of aliases"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_yaml_that_cannot_be_plain_values_is_told(text, rule):
    assert rule in problem(parse_yaml, text).rule


def test_an_alias_stands_for_its_value():
    assert parse_yaml("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}


def test_broken_yaml_has_a_place():
    assert problem(parse_yaml, "a: 1\na: 2\n").place("c.yaml") == "c.yaml:2:1"
