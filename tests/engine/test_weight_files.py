"""Safetensors folders: read by rectangles, written header first, and there whole or not at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8bridge.engine import weight_files
from fp8bridge.engine.weight_files import FileWriter, WeightFiles
from fp8bridge.errors import ConfigError

TENSORS = {
    "codes": torch.arange(300 * 130, dtype=torch.int32).to(torch.uint8).view(300, 130).view(torch.float8_e4m3fn),
    "vector": torch.arange(7).bfloat16(),
    "cube": torch.arange(24).view(2, 3, 4).float(),
    "scalar": torch.tensor(3.5),
    "ids": torch.arange(5),
}


def same(a, b):
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_rectangles_are_those_of_the_matrix_view(folder):
    files = WeightFiles(folder)
    assert same(files.read("codes", (128, 300), (64, 65)), TENSORS["codes"][128:300, 64:65])
    assert torch.equal(files.read("vector", (2, 5)), TENSORS["vector"][2:5, None])
    assert torch.equal(files.read("cube", (1, 2), (3, 9)), TENSORS["cube"].view(2, 12)[1:2, 3:9])
    assert files.read("scalar").item() == 3.5
    assert {n: s.matrix for n, s in files.tensors.items()} == {
        "codes": (300, 130), "vector": (7, 1), "cube": (2, 12), "scalar": (1, 1), "ids": (5, 1),
    }  # fmt: skip


def test_written_files_are_safetensors_own(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = [(n, str(t.dtype).removeprefix("torch."), t.shape) for n, t in TENSORS.items()]
    with FileWriter(path, tensors) as file:
        for name, tensor in reversed(TENSORS.items()):
            file.write(name, tensor)
    found = load_file(path)
    assert sorted(found) == sorted(TENSORS)
    assert all(
        found[n].dtype == t.dtype and found[n].shape == t.shape and same(found[n], t) for n, t in TENSORS.items()
    )
    whole = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in TENSORS.values()])
    with FileWriter(tmp_path / "again", tensors) as file:
        file.write_all(whole)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is not a safetensors index"),
        (json.dumps({"weight_map": ["a"]}), "is not a safetensors index"),
        (json.dumps({"weight_map": {"codes": "../secret.safetensors"}}), "names files outside its folder"),
        (json.dumps({"weight_map": {"codes": "gone.safetensors"}}), "cannot read .*gone.safetensors"),
        (json.dumps({"weight_map": {"codes": "broken.safetensors"}}), "cannot read .*broken.safetensors"),
        (json.dumps({"weight_map": {"other": "model.safetensors"}}), "has no other, which the index says"),
    ],
)
def test_a_broken_folder_is_named(folder, index, says):
    (folder / "broken.safetensors").write_bytes(b"not one")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=says):
        WeightFiles(folder)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ConfigError, match="has neither"):
        WeightFiles(tmp_path)


def start(target, **given):
    return weight_files.start_folder(target, **({"overwrite": False} | given))


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "deep" / "model"
    temporary = start(target)
    (temporary / "config.json").write_text("{}")
    assert not target.exists()
    weight_files.finish_folder(temporary, target)
    assert [p.name for p in target.iterdir()] == ["config.json"]
    assert os.listdir(target.parent) == ["model"]


def test_an_old_folder_is_replaced_only_at_the_end_and_only_if_it_is_a_model(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="exists already"):
        start(target)
    with pytest.raises(ConfigError, match="is no model folder"):
        start(target, overwrite=True)
    (target / "config.json").write_text("old")
    temporary = start(target, overwrite=True)
    (temporary / "config.json").write_text("new")
    assert (target / "config.json").read_text() == "old"
    weight_files.finish_folder(temporary, target)
    assert (target / "config.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_a_crash_between_the_renames_leaves_the_old_folder_beside(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    temporary = start(target, overwrite=True)
    (temporary / "config.json").write_text("new")
    rename, names = type(target).rename, []

    def crash(self, to):
        names.append(self.name)
        if len(names) == 2:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(type(target), "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        weight_files.finish_folder(temporary, target)
    assert (tmp_path / ".model.old" / "config.json").read_text() == "old"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a folder|exists already"):
        start(tmp_path / "file" / "model")


def test_only_what_is_neither_weights_nor_config_is_copied(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    kept = {"tokenizer.json", "generation_config.json", "vocab.txt", "chat_template.jinja"}
    left = {"config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}
    for name in kept | left:
        (source / name).write_text(name)
    weight_files.copy_other_files(source, target)
    assert {p.name for p in target.iterdir()} == kept
