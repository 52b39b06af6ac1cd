"""The cache on disk: equal, torch-free, safe against broken files and several writers."""

import gc
import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path

import modules
import pytest

import piper.capture.sampling
from piper.capture import CacheNotice, capture
from piper.capture.cache import cache_folder, cache_key, load, prune, store
from piper.capture.codec import from_json, to_json
from piper.models import find_model
from piper.models.find import from_config

REPOSITORY = Path(__file__).parents[3]
TINY = find_model("tiny-llama")
NOW_S = 2_000_000_000
SIZES = {"micro_batch": 1, "seq_len": 16, "dtype": "fp32"}


@pytest.fixture
def fresh_captures(monkeypatch):
    """Counts captures that were not served from the cache."""
    done = []
    original = piper.capture._sampled
    monkeypatch.setattr(piper.capture, "_sampled", lambda *a, **k: (done.append(1), original(*a, **k))[1])
    return done


def content_of(file):
    """Return what an entry holds, without its first line."""
    return json.loads(file.read_bytes().partition(b"\n")[2])


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
    (family,) = content_of(file)["families"]
    assert len(family["content"]["bodies"]) == 10  # embedding, seven of a layer, norm, head
    segments = capture(TINY, cache_dir=tmp_path, **SIZES).segments
    assert len({id(segment.forward) for segment in segments}) == 9  # both norms of layer borders are alike


def test_the_file_of_the_largest_model_is_small(tmp_path):
    capture(find_model("llama3.1-405b"), cache_dir=tmp_path, micro_batch=1, seq_len=8192, dtype="bf16")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 400_000


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


def test_a_fresh_capture_of_no_family_imports_sympy_or_dynamo():
    code = (
        "import sys; from piper.capture import KernelChoice\nfrom piper.capture.fresh import capture_fresh\n"
        "from piper.models.find import from_config\n"
        "from tests.tiny_configs import TINY\n"
        "sizes = {'micro_batch': 1, 'seq_len': 16, 'dtype': 'bf16'}\n"
        "for name, config in TINY.items():\n"
        "    source = from_config(config, name=name, kind='config', where=name)\n"
        "    capture_fresh(source, name=name, sizes=sizes, kernels=KernelChoice(), dedupe=True)\n"
        "    assert not {'sympy', 'torch._dynamo'} & sys.modules.keys(), name\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:200], id="cut off"),
        pytest.param(lambda content: content[:-1], id="one byte short"),
        pytest.param(lambda content: content.partition(b"\n")[2], id="without its first line"),
        pytest.param(lambda content: b'{"format": 5}', id="foreign"),
        pytest.param(lambda content: b"\xff\x00" * 40, id="not even a text"),
        pytest.param(lambda content: content.replace(b"64", b"65", 1), id="another number"),
        pytest.param(lambda content: content.replace(b"capture ", b"capture 1", 1), id="another format"),
    ],
)
def test_a_damaged_file_is_no_entry_and_is_told(tmp_path, damage):
    store(tmp_path, "key", {"numbers": [64] * 300})
    file = tmp_path / "key.capture"
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert file.read_bytes() != good
    with pytest.warns(CacheNotice, match=f"cache: {file} is damaged: captured anew"):
        assert load(tmp_path, "key") is None


def test_a_damaged_file_is_captured_anew_and_mended(fresh_captures, tmp_path):
    first = capture(TINY, cache_dir=tmp_path, **SIZES)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:1000])
    with pytest.warns(CacheNotice):
        assert capture(TINY, cache_dir=tmp_path, **SIZES) == first
    assert len(fresh_captures) == 2
    assert file.read_bytes() == good


@pytest.mark.parametrize("change", [{"micro_batch": 2}, {"seq_len": 8}, {"dtype": "bf16"}])
def test_other_sizes_are_captured_or_follow_but_are_never_mixed_up(tmp_path, change):
    capture(TINY, cache_dir=tmp_path, **SIZES)
    model = capture(TINY, cache_dir=tmp_path, **(SIZES | change))
    assert all(getattr(model, name) == value for name, value in change.items())
    assert model == capture(TINY, cache_dir=tmp_path / "other", **(SIZES | change))


def test_another_microbatch_is_no_further_capture(fresh_captures, tmp_path):
    for micro_batch in (1, 2, 7, 64):
        assert capture(TINY, cache_dir=tmp_path, **(SIZES | {"micro_batch": micro_batch}))
    assert len(fresh_captures) == 1


def test_what_is_captured_without_replays_is_kept_too(monkeypatch, fresh_captures, tmp_path):
    first = capture(TINY, cache_dir=tmp_path, dedupe=False, **SIZES)
    monkeypatch.setattr(piper.capture, "_captured", None)
    assert capture(TINY, cache_dir=tmp_path, dedupe=False, **SIZES) == first
    assert not fresh_captures


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
        return cache_key("f", "fp32")

    assert len({cache_key("f", "fp32"), cache_key("f", "bf16"), key_of("9.9.9"), key_of("9.9.10")}) == 4
    assert key_of("9.9.9") == key_of("9.9.9")


def test_the_folder_is_the_argument_else_the_environment_else_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPER_CACHE_DIR", str(tmp_path / "environment"))
    assert cache_folder(tmp_path) == tmp_path
    assert cache_folder(None) == tmp_path / "environment"
    monkeypatch.delenv("PIPER_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "piper"


def test_a_folder_that_cannot_be_used_only_means_no_cache_and_is_told(fresh_captures, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(CacheNotice) as told:
        first = capture(TINY, cache_dir=blocked, **SIZES)
    assert {str(notice.message) for notice in told} == {
        f"cache: {blocked} cannot be read (Not a directory): captured anew",
        f"cache: nothing can be kept in {blocked} (File exists): set PIPER_CACHE_DIR to another folder",
    }
    with pytest.warns(CacheNotice):
        assert capture(TINY, cache_dir=blocked, **SIZES) == first
    assert len(fresh_captures) == 2
    assert blocked.read_text() == "not a folder"


def test_a_missing_folder_is_made(tmp_path):
    capture(TINY, cache_dir=tmp_path / "a" / "b", **SIZES)
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1


def test_a_failed_write_leaves_nothing_behind(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(CacheNotice, match="No space left on device"):
        store(tmp_path, "k" * 64, {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_tells_of_the_cache_in_one_line(tmp_path, capfd):
    blocked = tmp_path / "file"
    blocked.write_text("")
    environment = os.environ | {"PIPER_CACHE_DIR": str(blocked)}
    command = [sys.executable, "-m", "piper", "simulate", "tiny-llama", "--gpus", "2", "--json"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout)["n_gpus"] == 2
    lines = done.stderr.splitlines()
    assert lines[0] == f"notice: cache: {blocked} cannot be read (Not a directory): captured anew"
    assert len(lines) == 2


def test_what_was_used_longest_ago_is_deleted_first_and_foreign_files_stay(tmp_path):
    for name in ("a", "b", "c", "d"):
        store(tmp_path, name, {"text": "x" * 1000})
    (tmp_path / "foreign.json").write_bytes(b"x" * 10_000)
    for age_s, name in enumerate(("b", "c", "a", "d")):
        os.utime(tmp_path / f"{name}.capture", (NOW_S - age_s, NOW_S - age_s))
    size = (tmp_path / "a.capture").stat().st_size
    prune(tmp_path, max_bytes=2 * size, now_s=NOW_S)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b.capture", "c.capture", "foreign.json"]


def test_reading_counts_as_use(tmp_path):
    store(tmp_path, "a", {})
    os.utime(tmp_path / "a.capture", (0, 0))
    assert load(tmp_path, "a") == {}
    assert (tmp_path / "a.capture").stat().st_mtime > 0


def test_files_that_a_process_left_unfinished_are_deleted_after_an_hour(tmp_path):
    names = f".{'k' * 16}.{'0' * 16}.tmp", f".{'k' * 16}.{'1' * 16}.tmp", "other.tmp"
    old, new, foreign = (tmp_path / name for name in names)
    for file, age_s in ((old, 3601), (new, 3599), (foreign, 9999)):
        file.write_bytes(b"x")
        os.utime(file, (NOW_S - age_s, NOW_S - age_s))
    prune(tmp_path, max_bytes=0, now_s=NOW_S)
    assert sorted(tmp_path.iterdir()) == sorted([new, foreign])


def test_many_processes_that_capture_one_model_leave_one_whole_file(tmp_path):
    expected = capture(TINY, cache_dir=tmp_path / "alone", **SIZES)
    code = (
        "import sys; from piper.capture import capture; from piper.models import find_model\n"
        "for micro_batch in (1, 2):\n"
        "    capture(find_model('tiny-llama'), micro_batch=micro_batch, seq_len=16, dtype='fp32')\n"
    )
    environment = os.environ | {"PIPER_CACHE_DIR": str(tmp_path / "shared")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=environment) for _ in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    (alone,), (shared,) = (list((tmp_path / name).iterdir()) for name in ("alone", "shared"))
    assert (shared.name, shared.read_bytes()) == (alone.name, alone.read_bytes())
    assert capture(TINY, cache_dir=tmp_path / "shared", **SIZES) == expected


def test_writers_and_readers_of_one_entry_never_see_half_of_it(tmp_path):
    code = (
        "import sys, warnings; from pathlib import Path\n"
        "from piper.capture.cache import load, store\n"
        "warnings.simplefilter('error')\n"
        "entry = {'text': 'x' * 200_000}\n"
        "for _ in range(100):\n"
        "    store(Path(sys.argv[1]), 'key', entry)\n"
        "    assert load(Path(sys.argv[1]), 'key') == entry\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY) for _ in "abcd"
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["key.capture"]


def test_the_collector_rests_during_a_capture_only(monkeypatch, tmp_path):
    seen = []
    original = piper.capture.sampling.sample
    monkeypatch.setattr(
        piper.capture.sampling, "sample", lambda *a, **k: (seen.append(gc.isenabled()), original(*a, **k))[1]
    )
    capture(TINY, cache_dir=tmp_path, **SIZES)
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        capture(TINY, cache_dir=tmp_path, **SIZES)
        assert not gc.isenabled()
    finally:
        gc.enable()
