"""The cache on disk: equal, torch-free, safe against broken files and several writers."""

import importlib.machinery
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import modules
import pytest

import piper.capture
from piper.capture import capture
from piper.capture.cache import cache_folder, cache_key
from piper.capture.codec import from_json, to_json
from piper.models import find_model
from piper.models.find import from_config

REPOSITORY = Path(__file__).parents[3]
TINY = find_model("tiny-llama")
SIZES = {"micro_batch": 1, "seq_len": 16, "dtype": "fp32"}


@pytest.fixture
def fresh_captures(monkeypatch):
    """Counts captures that were not served from the cache."""
    done = []
    original = piper.capture._captured
    monkeypatch.setattr(piper.capture, "_captured", lambda *a, **k: (done.append(1), original(*a, **k))[1])
    return done


@pytest.mark.parametrize("module", [modules.Chain(), modules.Pairs(), modules.Tied(), modules.Skip()],
                         ids=lambda module: type(module).__name__)  # fmt: skip
def test_a_captured_model_survives_json(module):
    model = capture(module, **SIZES)
    assert from_json(json.loads(json.dumps(to_json(model)))) == model


def test_what_was_captured_once_is_read_the_second_time(fresh_captures, tmp_path):
    first = capture(TINY, cache_dir=tmp_path, **SIZES)
    second = capture(TINY, cache_dir=tmp_path, **SIZES)
    assert second == first
    assert len(fresh_captures) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_equal_layers_are_written_once_and_shared_when_read(tmp_path):
    capture(TINY, cache_dir=tmp_path, **SIZES)
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_bytes())["bodies"]) == 10  # embedding, seven of a layer, norm, head
    segments = capture(TINY, cache_dir=tmp_path, **SIZES).segments
    assert len({id(segment.forward) for segment in segments}) == 9  # both norms of layer borders are alike


def test_the_file_of_the_largest_model_is_small(tmp_path):
    capture(find_model("llama3.1-405b"), cache_dir=tmp_path, micro_batch=1, seq_len=8192, dtype="bf16")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 200_000


def test_a_cache_hit_loads_no_torch(tmp_path):
    expected = capture(TINY, cache_dir=tmp_path, **SIZES)
    code = (
        "import json, sys; from piper.capture import capture; from piper.capture.codec import to_json\n"
        "from piper.models import find_model\n"
        "model = capture(find_model('tiny-llama'), micro_batch=1, seq_len=16, dtype='fp32')\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps(to_json(model)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=os.environ | {"PIPER_CACHE_DIR": str(tmp_path)},
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert from_json(json.loads(done.stdout)) == expected


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe"])
def test_a_fresh_capture_imports_neither_sympy_nor_dynamo(model, tmp_path):
    code = (
        "import sys; from piper.capture import capture; from piper.models import find_model\n"
        f"capture(find_model('{model}'), micro_batch=1, seq_len=16, dtype='bf16')\n"
        "assert 'torch' in sys.modules\n"
        "sys.exit('sympy' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    environment = os.environ | {"PIPER_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"format": 0}', b'{"format": 1}', b"\xff\x00"]
)
def test_a_broken_file_is_captured_anew(fresh_captures, tmp_path, content):
    first = capture(TINY, cache_dir=tmp_path, **SIZES)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    assert capture(TINY, cache_dir=tmp_path, **SIZES) == first
    assert len(fresh_captures) == 2
    assert file.read_bytes() == good


def test_a_half_written_file_is_captured_anew(fresh_captures, tmp_path):
    first = capture(TINY, cache_dir=tmp_path, **SIZES)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    assert capture(TINY, cache_dir=tmp_path, **SIZES) == first
    assert len(fresh_captures) == 2


@pytest.mark.parametrize("change", [{"micro_batch": 2}, {"seq_len": 8}, {"dtype": "bf16"}])
def test_other_sizes_are_other_entries(fresh_captures, tmp_path, change):
    capture(TINY, cache_dir=tmp_path, **SIZES)
    model = capture(TINY, cache_dir=tmp_path, **(SIZES | change))
    assert all(getattr(model, name) == value for name, value in change.items())
    assert len(fresh_captures) == 2


def test_another_config_is_another_entry_and_another_name_is_not(fresh_captures, tmp_path):
    capture(TINY, cache_dir=tmp_path, **SIZES)
    renamed = from_config(TINY.config, name="mine", kind="config", where="mine")
    assert capture(renamed, cache_dir=tmp_path, **SIZES).facts.name == "mine"
    assert len(fresh_captures) == 1
    wider = from_config(
        {**TINY.config, "intermediate_size": 100}, name="tiny-llama", kind="config", where="t"
    )
    capture(wider, cache_dir=tmp_path, **SIZES)
    assert len(fresh_captures) == 2


def test_the_key_depends_on_the_version_of_torch(monkeypatch, tmp_path):
    def key_of(version):
        (tmp_path / "version.py").write_text(f"__version__ = {version!r}")
        spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
        return cache_key("f", **SIZES)

    assert len({cache_key("f", **SIZES), key_of("9.9.9"), key_of("9.9.10")}) == 3
    assert key_of("9.9.9") == key_of("9.9.9")


def test_the_folder_is_the_argument_else_the_environment_else_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPER_CACHE_DIR", str(tmp_path / "environment"))
    assert cache_folder(tmp_path) == tmp_path
    assert cache_folder(None) == tmp_path / "environment"
    monkeypatch.delenv("PIPER_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "piper"


def test_a_folder_that_cannot_be_written_only_means_no_cache(fresh_captures, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    first = capture(TINY, cache_dir=blocked, **SIZES)
    assert capture(TINY, cache_dir=blocked, **SIZES) == first
    assert len(fresh_captures) == 2
    assert blocked.read_text() == "not a folder"


def test_many_writers_leave_one_whole_file(tmp_path):
    model = capture(TINY, cache_dir=tmp_path, **SIZES)
    (file,) = tmp_path.iterdir()
    file.unlink()
    code = (
        "import sys, time; from pathlib import Path\n"
        "import json; from piper.capture.cache import load, store\n"
        "from piper.capture.codec import from_json\n"
        "folder, key, text = Path(sys.argv[1]), sys.argv[2], sys.stdin.read()\n"
        "model = from_json(json.loads(text))\n"
        "for _ in range(60):\n"
        "    store(folder, key, model)\n"
        "    assert load(folder, key) == model\n"
    )

    def write(_):
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), file.stem], cwd=REPOSITORY, check=True, text=True,
            input=json.dumps(to_json(model)), timeout=120,
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
    assert capture(TINY, cache_dir=tmp_path, **SIZES) == model
