"""Tests of checkpoint manifests: altered bytes are found, and any input either parses or raises an error."""

import json

import pytest
from ebbtide.runtime.checkpoint.deepspeed.loading import newest_whole
from ebbtide.runtime.checkpoint.errors import CheckpointError, ManifestError
from ebbtide.runtime.checkpoint.format.manifest import (
    GLOBAL_NAME,
    FileRecord,
    GlobalManifest,
    RankManifest,
    block_hash,
    dump,
    parse,
)
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.checkpoint.conftest import BLOCK, some_state

RANK = RankManifest(
    rank=0,
    world_size=1,
    nonce="n",
    tag="t",
    step=3,
    versions={"torch": "2"},
    files=[FileRecord(path="a.pt", size_bytes=5, block_bytes=4, hashes=[block_hash(b"x")] * 2)],
)


def sealed(body):
    """Return a checkpoint manifest with the given body and the hash that fits it, as an attacker could write."""
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"body":{text},"xxh3_128":"{block_hash(text.encode())}"}}\n'.encode()


def test_round_trip():
    assert parse(dump(RANK), RankManifest, "m") == RANK


def test_every_flipped_bit_is_found():
    data = dump(RANK)
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(ManifestError):
                parse(bytes(bad), RankManifest, "m")


def test_every_truncation_is_found():
    data = dump(RANK)
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            parse(data[:length], RankManifest, "m")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes(data):
    for kind in (RankManifest, GlobalManifest):
        with pytest.raises(ManifestError):
            parse(data, kind, "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(JSON, st.sampled_from(sorted(RankManifest.model_fields)))
@settings(max_examples=300, deadline=None)
def test_arbitrary_values_in_a_sealed_manifest(value, key):
    body = json.loads(dump(RANK))["body"]
    body[key] = value
    try:
        page = parse(sealed(body), RankManifest, "m")
    except ManifestError:
        return
    assert dump(page) == sealed(body)  # an accepted manifest is the one that was written


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_paths_stay_inside(path):
    body = json.loads(dump(RANK))["body"]
    body["files"][0]["path"] = path
    with pytest.raises(ManifestError, match="inside the checkpoint"):
        parse(sealed(body), RankManifest, "m")


def test_newer_format_is_refused():
    body = json.loads(dump(RANK))["body"]
    body["format"] = 2
    with pytest.raises(ManifestError, match="upgrade ebbtide"):
        parse(sealed(body), RankManifest, "m")


def test_deep_nesting_is_an_error_not_a_crash():
    with pytest.raises(ManifestError):
        parse(b"[" * 200_000, RankManifest, "m")


def test_flips_and_truncations_of_every_file(bench):
    bench.save(some_state(1), "good")
    bench.save(some_state(2), "bad")
    files = sorted(p for p in (bench.folder / "bad").rglob("*") if p.is_file())
    assert {p.suffix for p in files} == {".pt", ".json"}
    assert len(files) == 4
    tried = 0
    for path in files:
        data = path.read_bytes()
        places = {0, 1, len(data) - 1, *range(BLOCK // 2, len(data), BLOCK), len(data) // 3}
        damages = [data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] for at in sorted(places)]
        damages += [data[:cut] for cut in (0, 1, len(data) // 2, len(data) - 1)]
        damages += [data + b"\0", None]
        for damage in damages:
            path.write_bytes(damage) if damage is not None else path.unlink()
            if path.name == GLOBAL_NAME and damage is None:
                with pytest.raises(CheckpointError, match="has no file"):
                    verify(bench.folder, "bad")
            else:
                assert verify(bench.folder, "bad"), (path, len(damage or b""))
            assert newest_whole([bench.folder]).folder.name == "good"
            tried += 1
        path.write_bytes(data)
    assert tried > 50
    assert verify(bench.folder, "bad") == []
    assert newest_whole([bench.folder]).folder.name == "bad"


def test_list_shows_damaged_ones(bench):
    bench.save(some_state(1), "a")
    (bench.folder / "a" / GLOBAL_NAME).write_bytes(b"{}")
    (entry,) = list_checkpoints(bench.folder)
    assert entry.status.startswith("damaged: ")
    assert list_checkpoints(bench.folder / "nowhere") == []
