"""A run's folder is data, whoever wrote it: nothing in it is executed, and what can't be is refused in a sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_plot import make_run
from test_resume import interrupted, no_changes

import htsrl
from htsrl import envs
from htsrl.checkpoint import Checkpoint, _checksum, list_checkpoints, load_checkpoint, write_checkpoint
from htsrl.cli import main
from htsrl.digests import read_digests
from htsrl.errors import ConfigError
from htsrl.evaluation import evaluate_run
from htsrl.learner.learner import Learner
from htsrl.logfiles import JsonLines
from htsrl.plot import _read, plot_runs
from htsrl.resolve import resolve
from htsrl.restoring import load_run_checkpoint, refuse_unfit, waiting_evaluations
from htsrl.run import Progress, restored_logs
from htsrl.rundir import CONFIG, METRICS, update_result, write_atomically
from htsrl.settings import configure
from htsrl.tomlfile import load_config
from htsrl.training import fork, resume
from htsrl.usercode import refuse_code_in
from htsrl.verify import replay


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was interrupted, with one checkpoint."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    interrupted(run_dir, 2, env="CartPole-v1", checkpoint_every=1_000_000)
    assert len(list_checkpoints(run_dir / "checkpoints")) == 1
    return run_dir


@pytest.fixture
def run_dir(stopped, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path / "run")


def checkpoint_of(run_dir: Path) -> tuple[Path, Checkpoint]:
    (path,) = list_checkpoints(run_dir / "checkpoints")
    return path, load_checkpoint(path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------------------------------------------- checkpoint files


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def sealed(state: str) -> bytes:
    """A checkpoint without tensors whose checksum is right."""
    return file_of({"__metadata__": {"format": "1", "state": state, "sha256": _checksum({}, state)}})


def tensor_of(dtype: str, shape: list[int], size: int) -> bytes:
    return file_of({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, bytes(size))


@pytest.mark.parametrize(
    "file",
    [
        file_of({}, length=1 << 63),
        file_of({}, length=(1 << 64) - 1),
        file_of(b'{"a":' * 5_000),
        tensor_of("F32", [1 << 62, 4], 16),
        tensor_of("F32", [1 << 62, 0], 0),  # numpy makes no array of that shape, though nothing is in it
        tensor_of("F32", [1 << 63, 0], 0),
        tensor_of("F32", [0] * 100, 0),
        tensor_of("BF16", [8], 16),  # types that numpy doesn't have
        tensor_of("F8_E4M3", [8], 8),
        tensor_of("F4", [8], 4),
        sealed("[" * 100_000 + "]" * 100_000),
        sealed('{"steps": ' + "9" * 5_000 + "}"),
        sealed(""),
        sealed("[1]"),
        sealed("null"),
        b"",
        b"\x80\x04K\x01.",
    ],
    ids=lambda file: repr(file[8:40]),
)
def test_a_file_of_lies_is_refused(tmp_path, file):
    path = tmp_path / "steps-1.safetensors"
    path.write_bytes(file)
    with pytest.raises(ConfigError, match=r"steps-1\.safetensors .*(damaged|not a checkpoint)"):
        load_checkpoint(path)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zeros", tmp_path):
        with pytest.raises(ConfigError, match="is not a file"):
            load_checkpoint(path)
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + 1)
    with pytest.raises(ConfigError, match="larger than this machine's memory"):
        load_checkpoint(tmp_path / "hole")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_that_were_changed_are_noticed(stopped, tmp_path_factory, data):
    original, _ = checkpoint_of(stopped)
    content = bytearray(original.read_bytes())
    # The header is the interesting part
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 3_000), "at")
    new = data.draw(st.binary(max_size=8), "bytes")
    cut = data.draw(st.integers(0, 8), "cut")
    if bytes(content[at : at + cut]) == new:
        return
    content[at : at + cut] = new
    path = tmp_path_factory.mktemp("changed") / "c.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.safetensors"):
        load_checkpoint(path)


# --------------------------------------------------------------------------------- checkpoints that are whole, but lie

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([1 << 53, 1 << 63, 10**30, -(10**30), 1.5, -1.0, float("nan"), float("inf"), "", "x", "\x1b[2J"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from("ab"), values, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a JSON value, as keys and indices."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def changed(value: Any, path: tuple, new: Any) -> Any:
    """``value`` with another one at ``path``; without that where ``new`` is ``...``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def arrays(array: np.ndarray) -> st.SearchStrategy[np.ndarray]:
    """Other arrays in the place of ``array``."""
    return st.sampled_from(
        [
            array.astype(np.float64),
            array.astype(np.uint8),
            array.astype(bool),
            np.zeros((*array.shape, 2), array.dtype),
            np.zeros((*array.shape[:-1], 7), array.dtype),
            np.zeros(0, array.dtype),
            np.zeros((), array.dtype),
            array - np.ones((), array.dtype),
            array + np.full((), 100, array.dtype),
        ]
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_a_whole_checkpoint_says_it_is_refused_or_used(stopped, tmp_path_factory, data):
    _, checkpoint = checkpoint_of(stopped)
    tensors, state = dict(checkpoint.tensors), checkpoint.state
    if data.draw(st.booleans(), "state"):
        place = data.draw(st.sampled_from([p for p in places(state) if p[:1] != ("config",)][1:]), "place")
        state = changed(state, place, data.draw(ANY | st.just(...), "new"))
    else:
        name = data.draw(st.sampled_from(sorted(tensors)), "name")
        array = tensors.pop(name)
        other = st.sampled_from([f"{name}x", f"x/{name}", "episodes/../../x", "episodes/-1", "evaluation/x", name])
        for where in data.draw(st.lists(other, max_size=2), "names"):
            tensors[where] = data.draw(arrays(array), "array")
    path = tmp_path_factory.mktemp("lies") / "c.safetensors"
    write_checkpoint(path, Checkpoint(tensors, state))
    config = load_config(stopped / CONFIG)
    spec = envs.describe(config.env, config.environment)
    try:
        loaded = load_run_checkpoint(path)
        refuse_unfit(stopped, loaded, config, spec)
    except ConfigError:
        return
    Progress.restored(loaded)
    restored_logs(loaded, config.runtime.num_envs)
    waiting_evaluations(loaded)
    Learner(config, spec, torch.device("cpu")).restore(loaded.group, loaded.state["version"])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("interval", "x", "interval: input should be a valid integer"),
        ("interval", -1, "interval: input should be greater than or equal to 0"),
        ("version", 7, "version 7 after 3 intervals"),
        ("steps", 1 << 40, "steps after 3 intervals"),
        ("trajectory", "../../x", "trajectory: string should match"),
        ("finished", True, "a finished run has a result"),
        ("replicas", [], "not those of 4 replicas"),
        ("reproducible", 1, "reproducible: input should be a valid boolean"),
        ("layout", {"num_executors": 0}, "layout.num_executors: input should be greater than or equal to 1"),
    ],
)
def test_a_state_that_can_not_be_is_refused_before_anything_changes(run_dir, name, value, words):
    path, checkpoint = checkpoint_of(run_dir)
    write_checkpoint(path, Checkpoint(checkpoint.tensors, checkpoint.state | {name: value}))
    before = content(run_dir)
    with pytest.raises(ConfigError, match=re.escape(words)):
        resume(run_dir, no_changes())
    assert content(run_dir) == before


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("algorithm/exp_avg", np.zeros(3, np.float32), "no state of Adam"),
        ("algorithm/momentum", np.zeros((), np.float32), "no state of Adam"),
        ("episodes/0", np.array([0, 1, 2]), "outside of its space"),
        ("episodes/0", np.array([0.0, 1.0]), "the actions of replica 0 are float64"),
        ("episodes/4", np.array([0, 1]), "not those of 4 replicas"),
        ("last_obs", np.zeros((4, 5), np.float32), "last_obs is float32 (4, 5)"),
        ("parameters/extra", np.zeros(3, np.float32), "don't fit the network"),
        ("evaluation/../x", np.zeros(3, np.float32), "does not say after how many steps"),
        ("evaluation/9/x", np.zeros(3, np.float32), "don't fit the network"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_changes(run_dir, name, array, words):
    path, checkpoint = checkpoint_of(run_dir)
    write_checkpoint(path, Checkpoint(checkpoint.tensors | {name: array}, checkpoint.state))
    before = content(run_dir)
    with pytest.raises(ConfigError, match=re.escape(words)):
        resume(run_dir, no_changes())
    assert content(run_dir) == before


def test_weights_of_another_network_are_refused_where_they_are_used(run_dir, tmp_path):
    path, checkpoint = checkpoint_of(run_dir)
    wrong = {name: array.astype(np.float64) for name, array in checkpoint.group("parameters").items()}
    tensors = {f"parameters/{name}": array for name, array in wrong.items()}
    write_checkpoint(path, Checkpoint(checkpoint.tensors | tensors, checkpoint.state))
    with pytest.raises(ConfigError, match="doesn't fit this run's network"):
        evaluate_run(run_dir, episodes=1, stochastic=False)
    with pytest.raises(ConfigError, match="don't fit the new run's network"):
        fork(run_dir, no_changes(run_dir=tmp_path / "fork"))
    path.unlink()
    write_checkpoint(run_dir / "initial.safetensors", Checkpoint(tensors, {}))
    with pytest.raises(ConfigError, match=r"initial\.safetensors doesn't fit"):
        resume(run_dir, no_changes())


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(run_dir):
    path, _ = checkpoint_of(run_dir)
    path.write_bytes(b"damaged")
    before = content(run_dir)
    with pytest.raises(ConfigError, match="to start over"):
        resume(run_dir, no_changes())
    assert content(run_dir) == before


# -------------------------------------------------------------------------------------------------------------- code

EVIL = """
import pathlib
pathlib.Path({marker!r}).touch()
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("Evil-v0", entry_point=CartPoleEnv)
def network(spec): ...
"""


@pytest.mark.parametrize("named", [("env", "{}:Evil-v0"), ("network", "{}:network")])
@pytest.mark.parametrize("place", ["module", "package", "namespace"])
def test_code_in_a_runs_folder_is_never_imported(run_dir, tmp_path, monkeypatch, named, place):
    marker = tmp_path / "executed"
    code = EVIL.format(marker=str(marker))
    if place == "module":
        module, file = "evil_module", run_dir / "evil_module.py"
    elif place == "package":
        module, file = "evil_package", run_dir / "evil_package" / "__init__.py"
    else:  # the run's folder itself, seen from the one above
        module, file = "run.evil", run_dir / "evil.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    monkeypatch.chdir(tmp_path if place == "namespace" else run_dir)
    config = run_dir / CONFIG
    name, value = named[0], named[1].format(module)
    config.write_text(re.sub(rf'^{name} = ".*"$', f'{name} = "{value}"', config.read_text(), flags=re.MULTILINE))
    assert value in config.read_text()
    (run_dir / "digests.jsonl").write_text('{"interval": 0, "trajectory": "", "parameters": "", "losses": ""}\n')
    make_run(tmp_path / "other")
    attempts = [
        lambda: resume(run_dir, no_changes()),
        lambda: fork(run_dir, no_changes(run_dir=tmp_path / "fork")),
        lambda: evaluate_run(run_dir, episodes=1, stochastic=False),
        lambda: replay(run_dir),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match="names a module that lies in the run's own folder"):
            attempt()
    load_config(config)
    _read(run_dir, "label")  # what `htsrl plot` reads
    assert not marker.exists()


def test_ones_own_module_beside_a_run_is_fine(run_dir, tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    refuse_code_in(run_dir, "my_module:Mine-v0", "faulty_nets:linear")
    refuse_code_in(run_dir, "no_such_module:Mine-v0", "__main__:network")
    refuse_code_in(run_dir, "gfootball:academy_empty_goal_close", "auto")


def test_nothing_reads_a_format_that_can_execute():
    """Pickles reach a child from its own run, through multiprocessing, and never from a file."""
    package = Path(htsrl.__file__).parent
    folders = [package, *(package.parent / name for name in ("actors", "learner", "storage"))]
    sources = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(sources) > 50
    forbidden = (
        r"import pickle|pickle\.load|torch\.load|np\.load\b|marshal|shelve|yaml\.|(?<![.\w])eval\(|(?<![.\w])exec\("
    )
    found = {str(file): re.findall(forbidden, file.read_text()) for file in sources}
    assert {file: words for file, words in found.items() if words} == {}


# ------------------------------------------------------------------------------------------------------- other files


@pytest.mark.parametrize(
    "text",
    [
        b"seed = 0x" + b"f" * 20_000,
        b"hidden_sizes = [0x" + b"f" * 20_000 + b"]",
        b"seed = " + b"9" * 5_000,
        b"a = " + b"[" * 100_000,
        b"\xff\xfe",
        b"[algorithm]\nlearning_rate = nan",
        b"[algorithm]\nlearning_rate = 1e999",
        b'env = "CartPole-v1\\u001b]0;owned\\u0007"',
        b"x" * (1 << 20) + b"x",
        b"total_steps = -1",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_a_configuration_of_nonsense_is_refused(tmp_path, text):
    (tmp_path / CONFIG).write_bytes(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(tmp_path / CONFIG)
    assert str(refusal.value).replace("\n", "").isprintable()
    assert len(str(refusal.value)) < 1_000


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_configuration_is_refused_or_read(stopped, tmp_path_factory, data):
    content = bytearray((stopped / CONFIG).read_bytes())
    at = data.draw(st.integers(0, len(content)))
    content[at : at + data.draw(st.integers(0, 6))] = data.draw(
        st.binary(max_size=6)
        | st.sampled_from([b"nan", b"-1", b'""', b"[", b"inf", b"= 1e999", b"1979-05-27", b"true"])
    )
    path = tmp_path_factory.mktemp("toml") / CONFIG
    path.write_bytes(content)
    try:
        load_config(path)
    except ConfigError:
        return


def test_storages_beyond_this_machines_memory_are_refused():
    spec = envs.describe("CartPole-v1", configure("CartPole-v1").environment)
    for huge in ({"num_envs": 10**15, "sync_interval": 1_000_000}, {"num_envs": 4, "sync_interval": 10**18}):
        with pytest.raises(ConfigError, match=r"GiB.*lower --num-envs"):
            resolve(configure("CartPole-v1", minibatches=4, **huge), spec)


LINES = [
    b"not json",
    b"[1, 2]",
    b"null",
    b'{"steps": "1", "interval": 1}',
    b'{"steps": 1.5, "interval": 1}',
    b'{"steps": true, "interval": 1}',
    b'{"steps": 1e999, "interval": 1}',
    b'{"steps": NaN, "interval": 1}',
    b'{"steps": 99999999999999999999, "interval": 1}',
    b'{"steps": ' + b"9" * 5_000 + b"}",
    b"[" * 100_000,
    b"\xff",
    b"{}",
    b" " * (1 << 21),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:20]))
def test_a_damaged_log_is_named_with_its_line_and_nothing_is_changed(run_dir, line):
    path = run_dir / METRICS
    good = path.read_bytes()
    path.write_bytes(good + line + b"\n")
    number = good.count(b"\n") + 1
    before = content(run_dir)
    for attempt in (lambda: resume(run_dir, no_changes()), lambda: plot_runs([run_dir], run_dir / "curves.png")):
        with pytest.raises(ConfigError, match=rf"line {number} of .*metrics\.jsonl is damaged"):
            attempt()
    assert content(run_dir) == before
    (run_dir / "digests.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=r"digests\.jsonl is"):
        read_digests(run_dir)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(records=st.lists(st.dictionaries(st.sampled_from(["steps", "seconds", "episode_return_mean"]), ANY), min_size=1))
def test_whatever_a_record_says_it_is_refused_or_drawn(stopped, tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("drawn")
    shutil.copy(stopped / CONFIG, folder / CONFIG)
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        curves = _read(folder, "label")
    except ConfigError:
        return
    steps, seconds, values = curves.of("return")
    assert len(steps) == len(seconds) == len(values)
    curves.evaluated("return")


@pytest.mark.parametrize("written", ["[1]", "null", "[" * 100_000, "{", '"x"'])
def test_a_result_of_nonsense_is_replaced(tmp_path, written):
    (tmp_path / "result.json").write_text(written)
    update_result(tmp_path, {"steps": 3})
    assert json.loads((tmp_path / "result.json").read_text()) == {"steps": 3}


def test_links_in_a_runs_folder_lead_nowhere(run_dir, tmp_path):
    """A stranger's folder can't have lines written somewhere else."""
    outside = tmp_path / "outside"
    outside.write_text("precious\n")
    for name in ("metrics.jsonl", "evaluations.jsonl", "result.json"):
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).symlink_to(outside)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl can't be written to"):
        JsonLines(run_dir / "metrics.jsonl")
    with pytest.raises(ConfigError, match="is damaged"):
        resume(run_dir, no_changes())
    (run_dir / f".x.{os.getpid()}.tmp").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(run_dir / "x", b"y")
    update_result(run_dir, {"steps": 3})
    assert outside.read_text() == "precious\n"
    (run_dir / "digests.jsonl").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"digests\.jsonl can't be written to"):
        JsonLines(run_dir / "digests.jsonl")
    assert not (tmp_path / "new").exists()


def test_a_terminal_does_not_obey_what_a_file_says(run_dir, capsys):
    path, checkpoint = checkpoint_of(run_dir)
    odd = {f"parameters/\x1b]0;owned\x07\x9b{name}": array for name, array in checkpoint.group("parameters").items()}
    write_checkpoint(path, Checkpoint(odd, checkpoint.state))
    assert main(["eval", str(run_dir), "--episodes", "1"]) == 2
    message = capsys.readouterr().err
    assert "owned" in message
    assert not set(message) & {"\x1b", "\x07", "\x9b"}
