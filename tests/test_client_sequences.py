"""Any sequence of a cache for a few ranged reads: verified, counted, and never a whole shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty_server import Cache, Fault, FaultyServer, Handler, cut_after, make_cache, refuse, send
from format_samples import sequence, shard_bytes
from shard_parts import Parts
from test_format_shard import assert_same

from teachercache.cli import main
from teachercache.client import (
    BadAnswer,
    CacheIncomplete,
    CacheNotFound,
    Client,
    ConfigError,
    ConnectionFailed,
    IntegrityError,
    OfflineMiss,
    ServerError,
)
from teachercache.client.ranges import BlobRanges
from teachercache.format_spec import Code, Manifest, Shard, digest_bytes
from teachercache.format_spec.shard import TAIL_READ_BYTES

# one text stands in two shards, and twice in the second
ITEMS = [sequence(i, 30) for i in (0, 1, 2, 3, 1, 1, 4, 5)]
CACHE = make_cache((3, 4, 1), made=ITEMS)
SHARDS = CACHE.manifest.shards


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        running.add(CACHE)
        yield running


@pytest.fixture
def client(server: FaultyServer, tmp_path: Path) -> Iterator[Client]:
    with Client(server.url, cache_dir=tmp_path / "cache", retry_s=5.0) as made:
        yield made


def ranges(server: FaultyServer) -> list[tuple[int, int]]:
    """(offset, length) of the blob requests so far, which all ask for a range."""
    found = []
    for _, path, headers in server.log:
        if "/v1/blobs/" in path:
            digest = path.rpartition("/")[2]
            assert headers["If-Range"] == f'"{digest}"'
            first, last = headers["Range"].removeprefix("bytes=").split("-")
            found.append((int(first), int(last) - int(first) + 1))
    return found


def frame_of(shard: Shard, number: int) -> tuple[int, int]:
    return int(shard.index["offset"][number]), int(shard.index["bytes"][number])


def large_footer() -> Cache:
    return make_cache((2200, 3), made=[sequence(i, 2) for i in range(2203)])


def large_frames() -> Cache:
    return make_cache((40, 3), made=[sequence(i, 200, vocab_size=900) for i in range(43)])


@pytest.mark.parametrize(("make", "reads"), [(large_frames, 1), (large_footer, 2)])
def test_a_sequence_costs_a_read_of_the_tail_and_one_of_its_frame(
    server: FaultyServer, client: Client, make: Callable[[], Cache], reads: int
) -> None:
    cache = make()
    server.add(cache)
    shard, descriptor = Shard(cache.blobs[0]), cache.manifest.shards[0]
    footer = int(shard.index["offset"][-1] + shard.index["bytes"][-1])
    tail = descriptor.bytes - TAIL_READ_BYTES
    assert tail > 0
    assert (footer < tail) == (reads == 2)
    expected = [(tail, TAIL_READ_BYTES)] + [(footer, tail - footer)] * (reads - 1)
    with client.sequences(cache.id) as sequences:
        assert_same(sequences.read(7), cache.sequences[7])
        expected.append(frame_of(shard, 7))
        assert ranges(server) == expected
        assert_same(sequences.read(30), cache.sequences[30])
        expected.append(frame_of(shard, 30))
        assert ranges(server) == expected
        last = len(cache.sequences) - 1
        assert_same(sequences.read(last), cache.sequences[last])
    assert len(ranges(server)) == len(expected) + 2
    assert list((client.cache.root / "blobs").glob("**/*")) == []


def test_a_key_is_found_in_every_shard_that_has_it(server: FaultyServer, client: Client) -> None:
    with client.sequences(CACHE.manifest.digest) as sequences:
        found = sequences.find(ITEMS[1].key)
        assert next(found) == 1
        assert len(ranges(server)) == 1
        assert list(found) == [4, 5]
        assert list(sequences.find(bytes(32))) == []
        assert len(ranges(server)) == 3
        for number in (1, 5):
            assert_same(sequences.read(number), ITEMS[1])
        assert len(sequences) == 8
    assert len(ranges(server)) == 5


def test_shards_of_the_local_cache_are_read_there(server: FaultyServer, client: Client) -> None:
    path = client.cache.get(SHARDS[1], client.transport)
    del server.log[:]
    with client.sequences(CACHE.id) as sequences:
        assert_same(sequences.read(4), ITEMS[4])
        assert ranges(server) == []
        assert_same(sequences.read(0), ITEMS[0])
        assert len(ranges(server)) == 2
    path.write_bytes(bytes(SHARDS[1].bytes))
    with client.sequences(CACHE.id) as sequences:
        assert_same(sequences.read(4), ITEMS[4])
    assert len(ranges(server)) == 4
    assert not path.exists()


def test_offline_only_the_local_cache_is_there(
    server: FaultyServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.manifest(CACHE.id)
    client.cache.get(SHARDS[1], client.transport)
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "1")
    with client.sequences(CACHE.id) as sequences:
        assert_same(sequences.read(3), ITEMS[3])
        with pytest.raises(OfflineMiss, match="is not sent"):
            sequences.read(0)


def test_numbers_that_are_not_there(server: FaultyServer, client: Client) -> None:
    with client.sequences(CACHE.id) as sequences:
        for number in (-1, 8):
            with pytest.raises(ConfigError, match=f"sequence {number} of a cache of 8"):
                sequences.read(number)
    server.add(CACHE, shards=1)
    with client.sequences(CACHE.id) as sequences:
        assert_same(sequences.read(2), ITEMS[2])
        with pytest.raises(CacheIncomplete, match="not come to sequence 3 yet"):
            sequences.read(3)
    gap = replace(CACHE.manifest, shards=SHARDS[1:], complete=False)
    server.manifests[gap.digest] = gap.to_bytes()
    with client.sequences(gap.digest) as sequences:
        assert_same(sequences.read(3), ITEMS[3])
        with pytest.raises(CacheIncomplete, match="not come to sequence 2 yet"):
            sequences.read(2)
        assert list(sequences.find(ITEMS[1].key)) == [4, 5]
    with pytest.raises(CacheNotFound):
        client.sequences("0" * 64)


def pouring(status: int, **headers: str) -> tuple[Fault, list[int]]:
    """Promise 10 GB and send them until the client hangs up; the list has how many bytes went out."""
    sent: list[int] = []

    def fault(handler: Handler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(10**10))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.close_connection = True
        block = bytes(1 << 20)
        try:
            while sum(sent) < 10**10:
                handler.wfile.write(block)
                sent.append(len(block))
        except OSError:
            sent.append(0)

    return fault, sent


@pytest.mark.parametrize("in_range", [False, True])
def test_a_server_that_ignores_ranges_is_not_read_on(server: FaultyServer, client: Client, in_range: bool) -> None:
    """Sockets buffer a few MB; beyond them nothing is taken off."""
    place = f"bytes 0-{SHARDS[0].bytes - 1}/{SHARDS[0].bytes}"
    fault, sent = pouring(206, Content_Range=place) if in_range else pouring(200)
    server.fail("GET", "/v1/blobs/", fault)
    words = f"more than {place} of" if in_range else f"asked for {place} of .* got HTTP 200 with no range; .* pull"
    with client.sequences(CACHE.id) as sequences, pytest.raises(BadAnswer, match=words):
        sequences.read(0)
    assert sum(sent) < 10**8
    assert server.count("GET", "/v1/blobs/") == 1


SIZE = SHARDS[0].bytes


@pytest.mark.parametrize(
    "answer",
    [
        send(206, CACHE.blobs[0]),
        send(206, CACHE.blobs[0][1:], Content_Range=f"bytes 1-{SIZE - 1}/{SIZE}"),
        send(206, CACHE.blobs[0][:-1], Content_Range=f"bytes 0-{SIZE - 2}/{SIZE}"),
        send(206, CACHE.blobs[0], Content_Range=f"bytes 0-{SIZE - 1}/{SIZE + 1}"),
        send(206, CACHE.blobs[0], Content_Range=f"bytes 0-{SIZE - 1}/*"),
        send(206, CACHE.blobs[0], Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}", ETag='"another"'),
        send(204),
    ],
    ids=["no-range", "other-start", "other-end", "other-size", "no-size", "other-etag", "no-content"],
)
def test_another_range_is_refused(server: FaultyServer, client: Client, answer: Fault) -> None:
    server.fail("GET", "/v1/blobs/", answer)
    with client.sequences(CACHE.id) as sequences:
        with pytest.raises(BadAnswer, match=f"asked for bytes 0-{SIZE - 1}/{SIZE} of {SHARDS[0].digest}, got HTTP 20"):
            sequences.read(0)
        assert_same(sequences.read(0), ITEMS[0])


def test_broken_connections_do_not_show(server: FaultyServer, client: Client) -> None:
    server.fail("GET", "/v1/blobs/", cut_after(100), refuse(Code.UNAVAILABLE), cut_after(0))
    with client.sequences(CACHE.id) as sequences:
        assert_same(sequences.read(0), ITEMS[0])
    assert len(ranges(server)) == 2 + 3


def test_a_short_answer_without_length_is_asked_for_again(server: FaultyServer, client: Client) -> None:
    def unframed(handler: Handler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{SIZE - 1}/{SIZE}")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(CACHE.blobs[0][:1000])
        handler.hang_up()

    server.fail("GET", "/v1/blobs/", unframed)
    assert BlobRanges(client.transport, SHARDS[0].digest, SIZE).read(0, SIZE) == CACHE.blobs[0]


def test_a_connection_that_never_gets_further(server: FaultyServer, tmp_path: Path) -> None:
    server.fail("GET", "/v1/blobs/", *[cut_after(10)] * 100)
    with Client(server.url, cache_dir=tmp_path, retry_s=0.3) as client:
        sequences = client.sequences(CACHE.id)
        with pytest.raises(ConnectionFailed, match="broke off"):
            sequences.read(0)


def test_a_blob_that_is_gone_or_shorter(server: FaultyServer, client: Client) -> None:
    server.blobs[SHARDS[0].digest] = b""
    del server.blobs[SHARDS[1].digest]
    with client.sequences(CACHE.id) as sequences:
        with pytest.raises(IntegrityError, match=f"has fewer than {SIZE} bytes"):
            sequences.read(0)
        with pytest.raises(ServerError) as caught:
            sequences.read(3)
    assert caught.value.code is Code.NOT_FOUND


def test_damage_in_what_is_read_is_refused(server: FaultyServer, client: Client) -> None:
    offset, length = frame_of(Shard(CACHE.blobs[0]), 1)
    for place in (offset, offset + length - 1, SIZE - 200):
        damaged = bytearray(CACHE.blobs[0])
        damaged[place] ^= 1
        server.blobs[SHARDS[0].digest] = bytes(damaged)
        with client.sequences(CACHE.id) as sequences, pytest.raises(IntegrityError, match=r"sequence 1 .* cannot be"):
            sequences.read(1)


def test_damage_on_the_way_is_read_again(server: FaultyServer, client: Client) -> None:
    place = f"bytes 0-{SIZE - 1}/{SIZE}"
    server.fail("GET", "/v1/blobs/", send(206, bytes(SIZE), Content_Range=place))
    with client.sequences(CACHE.id) as sequences:
        assert_same(sequences.read(1), ITEMS[1])
    assert len(ranges(server)) == 3


def manifest_with(server: FaultyServer, blob: bytes, sequences: int, positions: int) -> Manifest:
    """The cache's manifest, but that its first shard is this."""
    digest = digest_bytes(blob)
    first = replace(SHARDS[0], digest=digest, bytes=len(blob), sequences=sequences, positions=positions)
    manifest = replace(CACHE.manifest, shards=(first,), complete=False)
    server.blobs[digest], server.manifests[manifest.digest] = blob, manifest.to_bytes()
    return manifest


def test_a_shard_is_held_against_the_manifest(server: FaultyServer, client: Client) -> None:
    parts, positions = Parts.of(CACHE.blobs[0]), 90
    maker = parts.fields["fingerprint"] | {"device": "gpu"}
    for blob, counts in (
        (CACHE.blobs[0], (2, positions)),
        (CACHE.blobs[0], (3, positions + 1)),
        (parts.with_fields(fingerprint=maker).build(), (3, positions)),
        (shard_bytes(*ITEMS[:3], profile="m5"), (3, positions)),
        (shard_bytes(*(sequence(i, 30, k=4) for i in range(3))), (3, positions)),
        (shard_bytes(*(sequence(i, 30, tail_samples=3) for i in range(3))), (3, positions)),
    ):
        manifest = manifest_with(server, blob, *counts)
        with client.sequences(manifest.digest) as sequences:
            for _ in range(2):
                with pytest.raises(IntegrityError, match="is sound, but is not what its manifest says"):
                    sequences.read(0)
    with client.sequences(manifest_with(server, CACHE.blobs[0], 3, positions).digest) as sequences:
        assert_same(sequences.read(0), ITEMS[0])


def test_inspect_shows_one_sequence(
    server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "cache"))
    with Client(server.url) as client:
        client.pull(CACHE.id, tmp_path / "pulled")
        shard = client.cache.get(SHARDS[1], client.transport)
        del server.log[:]
    stored = Shard(CACHE.blobs[1]).read(1)
    present = ~stored.rows.absent_P
    for what, number in (
        (CACHE.id, 4),
        (CACHE.manifest.digest, 4),
        (SHARDS[1].digest, 1),
        (str(shard), 1),
        (str(tmp_path / "pulled"), 4),
    ):
        assert main(["inspect", what, "--sequence", str(number), "--url", server.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["path"], found["sequence"], found["key"]) == (what, number, stored.key.hex())
        assert found["input_ids"] == stored.input_ids_L.tolist()
        assert (found["rows"], found["absent_rows"]) == (29, int((~present).sum()))
        assert found["counted_rows"] == int(stored.counted_P.sum())
        assert found["mean_support_mass"] == pytest.approx(
            np.mean(-np.expm1(stored.rows.log_tail_mass_P[present].astype(np.float64)))
        )
        assert found["mean_entropy"] == pytest.approx(np.mean(stored.rows.entropy_P[present].astype(np.float64)))
        assert found["example"]["sequence"] == number
    assert ranges(server) == []
    assert main(["inspect", CACHE.id, "--sequence", "0", "--url", server.url]) == 0
    assert len(ranges(server)) == 2
    text = capsys.readouterr().out
    assert f"path       {CACHE.id}\nsequence   0 with 30 tokens, key {ITEMS[0].key.hex()}\n" in text
    assert " of sequence 0, after " in text


@pytest.mark.parametrize(
    ("what", "number", "code", "words"),
    [
        ("request", "8", 2, "sequence 8 of a cache of 8"),
        ("folder", "8", 2, "has 8 sequences, none of the number 8"),
        ("folder", "-1", 2, "has 8 sequences, none of the number -1"),
        ("unknown", "0", 3, "the server has no sha256:"),
        ("none.tkc", "0", 3, "does not exist"),
    ],
)
def test_inspect_says_what_is_not_there(
    server: FaultyServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    number: str,
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "cache"))
    with Client(server.url) as client:
        client.pull(CACHE.id, tmp_path / "pulled")
    named = {"request": CACHE.id, "folder": str(tmp_path / "pulled"), "unknown": digest_bytes(b"unknown")}
    assert main(["inspect", named.get(what, what), f"--sequence={number}", "--url", server.url]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
