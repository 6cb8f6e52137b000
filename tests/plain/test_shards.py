"""The token shard: what is written is read, and no damage passes, each named with its file and place."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.checkpoints import differences
from redline.core.errors import UserError
from redline.core.values import to_json
from redline.data import shards
from redline.data.shards import (
    DATA_START,
    VERSION,
    Split,
    TokenizerId,
    check_dataset,
    open_dataset,
    open_shard,
    tokenizer_id,
    verify_shard,
    write_json,
    write_shard,
    write_stamps,
)
from redline.data.tokenizer import tokenizer

SMALL = TokenizerId(name="small", vocab=100, end_of_text=99, fingerprint="f" * 32)
LARGE = replace(SMALL, vocab=200_000, end_of_text=199_999)
DOCUMENTS = [[1, 2, 3], [4], list(range(50))]


def arrays(documents):
    return [numpy.array(document, dtype=numpy.uint32) for document in documents]


@pytest.fixture
def shard(tmp_path):
    write_shard(tmp_path / "a.tokens", SMALL, arrays(DOCUMENTS))
    return tmp_path / "a.tokens"


def make_folder(folder, train=(DOCUMENTS, [[5, 6]]), val=([[7]],)):
    """As prepare makes it."""
    folder.mkdir(exist_ok=True)
    index = {"format": "redline-tokens", "version": VERSION, "tokenizer": to_json(SMALL), "notes": []}
    made = []
    for split, parts in (("train", train), ("val", val)):
        listed = []
        for number, documents in enumerate(parts):
            path = folder / f"{split}-{number:05d}.tokens"
            header = write_shard(path, SMALL, arrays(documents))
            listed.append({"name": path.name, "header": to_json(header)})
            made.append(open_shard(path))
        index[split] = {"shards": listed}
    write_stamps(folder, made)
    write_json(folder / "index.json", index)
    return folder


# writing and reading


@given(st.lists(st.lists(st.integers(0, 98), min_size=0, max_size=20), max_size=6))
@settings(deadline=None)
def test_round_trip(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("shard") / "a.tokens"
    header = write_shard(path, SMALL, arrays(documents))
    found = open_shard(path)
    verify_shard(found)
    expected = [token for document in documents for token in (*document, 99)]
    assert found.tokens.tolist() == expected
    assert found.ends.tolist() == [place + 1 for place, token in enumerate(expected) if token == 99]
    assert (header.tokens, header.documents) == (len(expected), len(documents))
    assert found.header == header
    assert os.listdir(path.parent) == ["a.tokens"]


@pytest.mark.parametrize(("identity", "dtype"), [(SMALL, "uint16"), (LARGE, "uint32")])
def test_types_and_layout(tmp_path, identity, dtype):
    path = tmp_path / "a.tokens"
    write_shard(path, identity, arrays([[7, identity.vocab - 2]]))
    found = open_shard(path)
    assert found.header.dtype == dtype
    assert found.tokens.dtype == dtype
    data = path.read_bytes()
    assert data[:8] == b"REDLTOK\n"
    size = 3 * numpy.dtype(dtype).itemsize
    assert numpy.frombuffer(data[DATA_START : DATA_START + size], dtype=dtype).tolist() == found.tokens.tolist()
    assert json.loads(data[20:DATA_START]) == to_json(found.header)  # anyone can read it without us
    assert int.from_bytes(data[-8:], "little") == 3
    with pytest.raises(ValueError, match="read-only"):
        found.tokens[0] = 1


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place_and_nothing_is_left(tmp_path):
    with pytest.raises(UserError, match="token 5 is 100, and the ids are 0 to 99"):
        write_shard(tmp_path / "a.tokens", SMALL, arrays([[1, 2, 3], [0, 100]]))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_the_old_file_and_no_draft(shard, monkeypatch):
    before = shard.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left") as caught:
        write_shard(shard, SMALL, arrays([[1]]))
    assert str(shard) in caught.value.problem
    assert os.listdir(shard.parent) == [shard.name]
    assert shard.read_bytes() == before


def test_a_shard_travels_as_its_path(shard):
    found = open_shard(shard)
    assert found.tokens.size
    copy = pickle.loads(pickle.dumps(found))
    assert "tokens" not in vars(copy)
    assert copy.tokens.tolist() == found.tokens.tolist()


# damage


def test_every_flipped_byte_is_found(shard):
    data = shard.read_bytes()
    places = [*range(0, 40), *range(40, DATA_START, 97), *range(DATA_START, len(data))]
    for place in places:
        shard.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        with pytest.raises(UserError, match=r"a\.tokens"):
            verify_shard(open_shard(shard))
    shard.write_bytes(data)
    verify_shard(open_shard(shard))


def test_every_length_but_the_right_one_is_found(shard):
    data = shard.read_bytes()
    for length in [*range(0, 30), DATA_START - 1, DATA_START, DATA_START + 1, *range(len(data) - 20, len(data))]:
        shard.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"is cut short|is empty|is not a token shard"):
            open_shard(shard)
    shard.write_bytes(data + b"\0")
    with pytest.raises(UserError, match=f"file ends at byte {len(data) + 1:,}"):
        open_shard(shard)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"\x93NUMPY" + data[6:], "byte 0 begins"),
        (lambda data: data[:8] + (2).to_bytes(4, "little") + data[12:], "is of version 2.*reads version 1"),
        (lambda data: data[: DATA_START + 3], r"file ends at byte 4,099"),
        (lambda data: data[:50] + b"?" + data[51:], "do not fit their checksum"),
    ],
)
def test_damage_is_named(shard, change, text):
    shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(UserError, match=text) as caught:
        open_shard(shard)
    assert str(shard) in caught.value.problem


def forge(path, **changes):
    """A header that says something else, with its checksum and the hash as they should be."""
    found = open_shard(path)
    header = replace(found.header, **changes)
    data = path.read_bytes()
    path.write_bytes(shards._header_bytes(header) + data[DATA_START:])


def test_a_token_beyond_the_vocabulary_is_found_with_its_place(shard):
    forge(shard, tokenizer=replace(SMALL, vocab=40, end_of_text=39))
    with pytest.raises(UserError, match="token 3 is 99, and the ids are 0 to 39"):
        verify_shard(open_shard(shard))


def test_ends_that_are_not_ends_are_found(shard):
    forge(shard, tokenizer=replace(SMALL, end_of_text=3))
    with pytest.raises(UserError, match="list of documents .* end of text at token 2"):
        verify_shard(open_shard(shard))
    forge(shard, tokenizer=replace(SMALL, end_of_text=98))
    with pytest.raises(UserError, match="hold 0 ends of text, it lists 3"):
        verify_shard(open_shard(shard))


def test_a_header_that_makes_no_sense_is_refused(shard):
    text = json.dumps({**to_json(open_shard(shard).header), "dtype": "float64"}).encode().ljust(DATA_START - 20)
    preamble = shards.PREAMBLE.pack(shards.MAGIC, VERSION, len(text), shards.zlib.crc32(text))
    shard.write_bytes(preamble + text + shard.read_bytes()[DATA_START:])
    with pytest.raises(UserError, match="make no sense"):
        open_shard(shard)


# a split


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    start=st.integers(0, 60),
    length=st.integers(1, 30),
)
@settings(deadline=None)
def test_windows_lie_across_shards(tmp_path_factory, lengths, start, length):
    folder = tmp_path_factory.mktemp("split")
    whole, made = [], []
    for number, count in enumerate(lengths):
        document = [(number * 13 + place) % 98 for place in range(count)]
        write_shard(folder / f"{number}.tokens", SMALL, arrays([document]))
        made.append(open_shard(folder / f"{number}.tokens"))
        whole += [*document, 99]
    split = Split(shards=tuple(made))
    assert split.tokens == len(whole)
    start, length = start % len(whole), min(length, len(whole) - start % len(whole))
    assert split.gather([start, 0], length).tolist() == [whole[start : start + length], whole[:length]]
    for position in range(len(whole) + 1):
        assert split.documents_before(position) == whole[:position].count(99)


def test_a_shard_that_changes_under_way_is_named(shard):
    split = Split(shards=(open_shard(shard),))
    assert split.gather([0], 3).tolist() == [[1, 2, 3]]
    data = bytearray(shard.read_bytes())
    data[DATA_START] = 9
    shard.write_bytes(data)
    os.utime(shard, ns=(1, 1))  # whatever the clock's grain
    with pytest.raises(UserError, match=r"a\.tokens changed while it was being read"):
        split.gather([0], 3)


# a folder


def test_a_folder_is_opened(tmp_path):
    data = open_dataset(make_folder(tmp_path / "d"), vocab=100)
    assert data.train.tokens == 57 + 3
    assert data.train.documents == 4
    assert data.val.tokens == 2
    assert data.tokenizer == SMALL
    assert open_dataset(make_folder(tmp_path / "e", val=())).val is None


def test_the_fingerprint_is_of_the_tokens(tmp_path):
    one, two = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    other = make_folder(tmp_path / "c", train=([[1]],))
    prints = [open_dataset(folder).fingerprint for folder in (one, two, other)]
    assert prints[0] == prints[1] != prints[2]
    [print_differs, *others] = differences(open_dataset(one).identity, open_dataset(other).identity)
    assert print_differs.startswith("fingerprint: ")
    assert others == ["train.tokens: 60 there, 2 here", "train.documents: 4 there, 1 here"]


def test_a_model_of_another_tokenizer_is_refused(tmp_path):
    folder = make_folder(tmp_path / "d")
    open_dataset(folder, vocab=100, tokenizer_name=SMALL.name)
    with pytest.raises(UserError, match=f"made with the tokenizer '{SMALL.name}', the model reads and writes 'gpt2'"):
        open_dataset(folder, vocab=100, tokenizer_name="gpt2")


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="ids 0 to 99, the model has 64 entries"):
        open_dataset(make_folder(tmp_path / "d"), vocab=64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: (d / "index.json").unlink(), "holds no prepared data"),
        (lambda d: (d / "index.json").write_text("{"), "index.json is damaged"),
        (lambda d: (d / "index.json").write_text("[]"), "not an index"),
        (lambda d: (d / "train-00001.tokens").unlink(), r"cannot read the shard .*train-00001"),
        (lambda d: (d / "val-00000.tokens").write_bytes(b""), r"val-00000\.tokens is empty"),
        (lambda d: os.truncate(d / "train-00000.tokens", 4100), r"train-00000\.tokens is cut short"),
        (lambda d: shutil.copy(d / "val-00000.tokens", d / "train-00001.tokens"), "its tokens is 2, the list says 3"),
    ],
)
def test_a_broken_folder_is_found_at_the_start(tmp_path, change, text):
    folder = make_folder(tmp_path / "d")
    change(folder)
    with pytest.raises(UserError, match=text):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 9}, "is of version 9"),
        ({"tokenizer": None}, "is damaged"),
        ({"val": {"shards": [{"name": "../x", "header": {}}]}}, "not a file in the folder"),
        ({"train": {"shards": []}}, "nothing to train on"),
        ({"tokenizer": to_json(replace(SMALL, fingerprint="0"))}, "another tokenizer than the rest"),
    ],
)
def test_a_broken_index_is_found_at_the_start(tmp_path, change, text):
    folder = make_folder(tmp_path / "d")
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(UserError, match=text):
        open_dataset(folder)


def test_an_unfinished_folder_says_so(tmp_path):
    (tmp_path / "prepare.json").write_text("{}")
    with pytest.raises(UserError, match="is not finished"):
        open_dataset(tmp_path)


def damage(path: Path) -> None:
    """One token to another, the same length, and the time put back."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[DATA_START] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_copy_is_read_in_full_until_it_is_checked(tmp_path):
    make_folder(tmp_path / "d")
    shutil.copytree(tmp_path / "d", tmp_path / "copy", copy_function=shutil.copyfile)
    said: list[str] = []
    open_dataset(tmp_path / "copy", say=said.append)
    assert [line.partition(" were")[0] for line in said] == [f"3 of 3 shards in {tmp_path / 'copy'}"]
    whole, problems = check_dataset(tmp_path / "copy")
    assert (len(whole), problems) == (3, [])
    write_stamps(tmp_path / "copy", whole)
    said.clear()
    open_dataset(tmp_path / "copy", say=said.append)
    assert said == []


def test_damage_in_a_changed_file_is_found_at_the_start(tmp_path):
    folder = make_folder(tmp_path / "d")
    damage(folder / "train-00001.tokens")
    os.utime(folder / "train-00001.tokens")
    with pytest.raises(UserError, match=r"content of .*train-00001\.tokens is damaged"):
        open_dataset(folder)


def test_a_check_finds_what_time_and_size_do_not_show_and_goes_on_after_it(tmp_path):
    folder = make_folder(tmp_path / "d")
    damage(folder / "train-00000.tokens")
    open_dataset(folder)  # nothing to be seen without reading every byte
    os.truncate(folder / "val-00000.tokens", 10)
    whole, problems = check_dataset(folder)
    assert [shard.path.name for shard in whole] == ["train-00001.tokens"]
    assert ["train-00000" in problems[0].problem, "val-00000" in problems[1].problem] == [True, True]


def test_damaged_stamps_cost_a_check_and_nothing_else(tmp_path):
    folder = make_folder(tmp_path / "d")
    for text in ("{", "[]", "null"):
        (folder / "stamps.json").write_text(text)
        said: list[str] = []
        open_dataset(folder, say=said.append)
        assert len(said) == 1


# tokenizers


def test_tokenizers_are_told_apart():
    plain, gpt2 = tokenizer("bytes"), tokenizer("gpt2")
    assert tokenizer_id(plain) == tokenizer_id(tokenizer("bytes"))
    assert tokenizer_id(gpt2).vocab == 50257
    assert tokenizer_id(plain).fingerprint != tokenizer_id(gpt2).fingerprint
    swapped = replace(gpt2, encode=lambda text: gpt2.encode(text)[::-1])
    assert tokenizer_id(swapped).fingerprint != tokenizer_id(gpt2).fingerprint
    renamed = replace(gpt2, decode=lambda ids: gpt2.decode([{5: 6, 6: 5}.get(token, token) for token in ids]))
    assert tokenizer_id(renamed).fingerprint != tokenizer_id(gpt2).fingerprint
