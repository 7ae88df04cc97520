"""Streams: the stored rows, in the promised order, from a server or a directory, come what may."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_server import Cache, FaultyServer, cut_after, make_cache, refuse
from test_client_batch import check_row

from teachercache.client import (
    CacheIncomplete,
    CacheNotFound,
    CacheUnusable,
    Client,
    ConfigError,
    ConnectionFailed,
    IntegrityError,
    OfflineMiss,
    RequestFailed,
    TopkBatch,
    TopkStream,
    stream_topk,
)
from teachercache.client.order import epoch_order
from teachercache.format_spec import Code, Shard

CACHE = make_cache((3, 4, 2, 5))
COUNT = len(CACHE.sequences)
STORED = [sequence for blob in CACHE.blobs for sequence in Shard(blob)]


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        yield running


@pytest.fixture
def served(server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "cache"))
    server.add(CACHE)
    return server


@pytest.fixture
def pulled(served: FaultyServer, tmp_path: Path) -> Path:
    with Client(served.url) as client:
        client.pull(CACHE.id, tmp_path / "pulled")
    return tmp_path / "pulled"


def numbers(batches: Iterable[TopkBatch]) -> list[int]:
    """Which sequences the batches hold, leaving out the filling; checks every row on the way."""
    found = []
    for batch in batches:
        for b in range(len(batch)):
            length = int(batch.attention_mask_BT[b].sum())
            if length > 1:
                ids = batch.input_ids_BT[b, :length]
                number = next(i for i, item in enumerate(STORED) if np.array_equal(item.input_ids_L, ids))
                check_row(batch, b, STORED[number])
                found.append(number)
    return found


def stream_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "teachercache-stream"]


def test_stored_rows_in_order(served: FaultyServer) -> None:
    with stream_topk(served.url, CACHE.id, batch_size=4, shuffle=False) as stream:
        assert len(stream) == 4
        batches = list(stream)
        assert (len(stream), next(stream, None)) == (0, None)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert numbers(batches) == list(range(COUNT))
    assert [batch.cursor for batch in batches] == [4, 8, 12, 14]
    assert stream.manifest == CACHE.manifest


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_shuffled_epochs(served: FaultyServer, prefetch: int) -> None:
    with stream_topk(served.url, CACHE.manifest.digest, batch_size=5, seed=3, epochs=2, prefetch=prefetch) as stream:
        batches = list(stream)
    assert numbers(batches) == [*epoch_order(3, 0, COUNT), *epoch_order(3, 1, COUNT)]
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1]


def test_ranks_share_the_cache(pulled: Path) -> None:
    """Three ranks of two: two full steps, and a last one with two sequences, so that one rank gets none."""
    parts = []
    for rank in range(3):
        with stream_topk(pulled, batch_size=2, rank=rank, world_size=3) as stream:
            batches = list(stream)
            assert [len(batch) for batch in batches] == [2, 2, 2]
            parts.append(numbers(batches))
    assert [len(part) for part in parts] == [5, 5, 4]
    assert sorted(itertools.chain(*parts)) == list(range(COUNT))
    assert not batches[-1].counted_BP.any()


def test_a_rank_fetches_the_shards_it_needs_and_no_other(served: FaultyServer) -> None:
    """Sequence 7 is this rank's; of 8 to 13 none is left for it, and any of them says what its rows would have."""
    with stream_topk(served.url, CACHE.id, batch_size=1, shuffle=False, world_size=8, rank=7) as stream:
        assert [numbers([batch]) for batch in stream] == [[7], []]
    (third,) = (path for method, path, _ in served.log if method == "GET" and "/v1/blobs/" in path)
    assert third.endswith(CACHE.manifest.shards[2].digest)


def test_resume_with_another_world_size(pulled: Path) -> None:
    with stream_topk(pulled, batch_size=3, seed=1, epochs=2) as whole:
        expected = numbers(whole)
    with stream_topk(pulled, batch_size=3, seed=1, epochs=2) as stream:
        head = numbers(next(stream) for _ in range(2))
        state = stream.state_dict()
    assert state["cursor"] == stream.cursor == 6
    tails = []
    for rank in range(2):
        with stream_topk(pulled, batch_size=4, seed=1, epochs=2, rank=rank, world_size=2) as stream:
            stream.load_state_dict(state)
            tails.append(numbers(stream))
    with stream_topk(pulled, batch_size=1, seed=1, epochs=2, cursor=6) as stream:
        assert head + numbers(stream) == expected
    assert sorted(itertools.chain(head, *tails)) == sorted(expected)
    assert expected[6::2][:4] == tails[0][:4]


def test_state_goes_back_while_iterating(pulled: Path) -> None:
    with stream_topk(pulled, batch_size=3) as stream:
        state = stream.state_dict()
        first = numbers([next(stream), next(stream)])
        stream.load_state_dict(state)
        assert numbers([next(stream), next(stream)]) == first


def test_state_of_something_else_is_refused(pulled: Path) -> None:
    with stream_topk(pulled, batch_size=3) as stream:
        state = stream.state_dict()
        for name, value in (("request", "0" * 64), ("seed", 1), ("shuffle", False)):
            with pytest.raises(ConfigError, match=f"taken with {name}"):
                stream.load_state_dict(state | {name: value})
        with pytest.raises(ConfigError, match="no 'cursor'"):
            stream.load_state_dict({name: value for name, value in state.items() if name != "cursor"})
        with pytest.raises(ConfigError, match="cursor 99"):
            stream.load_state_dict(state | {"cursor": 99})


def test_endless(pulled: Path) -> None:
    with stream_topk(pulled, batch_size=COUNT, epochs=None) as stream:
        assert [next(stream).epoch for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(TypeError, match="no length"):
            len(stream)


def test_directory_needs_no_server(pulled: Path, served: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "1")
    asked = len(served.log)
    for cache in (None, CACHE.id, CACHE.manifest.digest):
        with stream_topk(str(pulled), cache, batch_size=4) as stream:
            assert sorted(numbers(stream)) == list(range(COUNT))
    assert len(served.log) == asked


def test_directories_that_hold_something_else(pulled: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound, match=r"holds no manifest\.json"):
        stream_topk(tmp_path / "nowhere", batch_size=1)
    with pytest.raises(CacheNotFound, match=f"holds request {CACHE.id}, not 0000"):
        stream_topk(pulled, "0" * 64, batch_size=1)
    (pulled / "manifest.json").write_bytes(CACHE.partial(2).to_bytes())
    with pytest.raises(CacheIncomplete):
        stream_topk(pulled, batch_size=1)


def damage(path: Path) -> None:
    """Flip a bit in the middle of the frames, keeping the size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_in_a_directory_is_told(pulled: Path) -> None:
    damage(pulled / "shards" / f"{CACHE.manifest.shards[1].digest[7:]}.tkc")
    with (
        stream_topk(pulled, batch_size=1, shuffle=False) as stream,
        pytest.raises(IntegrityError, match=r"\.tkc cannot be read: .*SPEC.*pull the cache again"),
    ):
        list(stream)
    assert 3 <= stream.cursor < 7


def test_missing_shard_in_a_directory_is_told(pulled: Path) -> None:
    (pulled / "shards" / f"{CACHE.manifest.shards[0].digest[7:]}.tkc").unlink()
    with (
        stream_topk(pulled, batch_size=1, shuffle=False) as stream,
        pytest.raises(IntegrityError, match="No such file"),
    ):
        next(stream)


def test_damage_in_the_local_cache_is_repaired(served: FaultyServer, tmp_path: Path) -> None:
    with stream_topk(served.url, CACHE.id, batch_size=4) as stream:
        list(stream)
    for path in (tmp_path / "cache" / "blobs").rglob("*"):
        if path.is_file():
            damage(path)
    with stream_topk(served.url, CACHE.id, batch_size=4) as stream:
        assert sorted(numbers(stream)) == list(range(COUNT))
    assert served.count("GET", "/v1/blobs") == 2 * len(CACHE.blobs)


def test_shard_that_is_not_what_the_manifest_says(served: FaultyServer) -> None:
    """The blob has its digest, and it is a sound shard of other sequences."""
    shards = CACHE.manifest.shards
    other = make_cache((5,), seed=1)
    cache = Cache(CACHE.sequences, CACHE.blobs, CACHE.manifest)
    lying = replace(other.manifest.shards[0], sequences=3)
    cache.manifest = replace(CACHE.manifest, shards=(lying, *shards[1:]))
    served.add(cache)
    served.blobs[lying.digest] = other.blobs[0]
    with (
        stream_topk(served.url, CACHE.id, batch_size=4, shuffle=False) as stream,
        pytest.raises(IntegrityError, match="is not what its manifest says"),
    ):
        next(stream)


def test_offline_from_the_local_cache(served: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with stream_topk(served.url, CACHE.id, batch_size=4) as stream:
        list(stream)
    asked = len(served.log)
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "1")
    with stream_topk(served.url, CACHE.id, batch_size=4) as stream:
        assert sorted(numbers(stream)) == list(range(COUNT))
    assert len(served.log) == asked


def test_offline_with_a_hole(served: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stream_topk(served.url, CACHE.id, batch_size=4) as stream:
        list(stream)
    (tmp_path / "cache" / "blobs" / "sha256" / (name := CACHE.manifest.shards[1].digest[7:])[:2] / name).unlink()
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "1")
    with (
        stream_topk(served.url, CACHE.id, batch_size=1, shuffle=False) as stream,
        pytest.raises(OfflineMiss, match="lacks shard"),
    ):
        list(stream)
    assert stream.cursor == 3


def test_broken_connections_do_not_show(served: FaultyServer) -> None:
    served.fail("GET", "/v1/blobs", cut_after(500), refuse(Code.DRAINING), cut_after(700))
    with stream_topk(served.url, CACHE.id, batch_size=4) as stream:
        assert sorted(numbers(stream)) == list(range(COUNT))


def test_error_loses_nothing(served: FaultyServer) -> None:
    """Batches before it arrive, it is raised, and the next call tries again at the same place."""
    served.fail("GET", f"/v1/blobs/{CACHE.manifest.shards[1].digest}", *[refuse(Code.UNAVAILABLE)] * 10)
    with stream_topk(served.url, CACHE.id, batch_size=1, shuffle=False, retry_s=0.0) as stream:
        head = [next(stream) for _ in range(3)]
        for _ in range(10):
            with pytest.raises(Exception, match="HTTP 503"):
                next(stream)
        assert numbers([*head, *stream]) == list(range(COUNT))


def test_cache_limit_is_checked_at_the_start(served: FaultyServer) -> None:
    size, largest = CACHE.manifest.num_bytes, max(shard.bytes for shard in CACHE.manifest.shards)
    with pytest.raises(CacheUnusable, match=f"shuffling the whole cache needs {size} bytes"):
        stream_topk(served.url, CACHE.id, batch_size=1, cache_limit_bytes=size - 1)
    with pytest.raises(CacheUnusable, match=f"the largest shard needs {largest} bytes"):
        stream_topk(served.url, CACHE.id, batch_size=1, shuffle=False, cache_limit_bytes=largest - 1)
    with stream_topk(served.url, CACHE.id, batch_size=1, shuffle=False, cache_limit_bytes=largest) as stream:
        assert numbers(stream) == list(range(COUNT))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"follow": True}, "follow needs shuffle=False"),
        ({"prefetch": -1}, "prefetch"),
        ({"batch_size": 0}, "batch_size"),
        ({"rank": 1}, "rank must be from 0 to 0"),
        ({"cursor": COUNT + 1}, "cursor"),
        ({"cache": None}, "name the cache"),
        ({"cache": "mine"}, "64 hex digits"),
    ],
)
def test_bad_arguments(served: FaultyServer, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stream_topk(served.url, **({"cache": CACHE.id, "batch_size": 1} | settings))
    assert stream_threads() == []


def test_bad_argument_shows_before_the_wait(served: FaultyServer) -> None:
    served.add(CACHE, shards=1)
    with pytest.raises(ConfigError):
        stream_topk(served.url, CACHE.id, batch_size=-1)


def land_shards(server: FaultyServer, pause_s: float, last: int) -> threading.Thread:
    """Let the teacher finish shard after shard, then the request complete."""

    def land() -> None:
        for shards in range(1, last + 1):
            time.sleep(pause_s)
            server.add(CACHE, shards=shards)
        if last == len(CACHE.blobs):
            server.add(CACHE)
        else:
            server.fail_request(CACHE)

    thread = threading.Thread(target=land)
    thread.start()
    return thread


def test_follow_a_running_teacher(server: FaultyServer, tmp_path: Path) -> None:
    server.add(CACHE, shards=0, state="queued")
    teacher = land_shards(server, 0.2, len(CACHE.blobs))
    with stream_topk(server.url, CACHE.id, batch_size=2, shuffle=False, follow=True, cache_dir=tmp_path) as stream:
        assert len(stream) == 7
        first = next(stream)
        assert teacher.is_alive()
        assert numbers([first, *stream]) == list(range(COUNT))
    teacher.join()


def test_follow_a_teacher_that_fails(server: FaultyServer, tmp_path: Path) -> None:
    """What it finished arrives before the error."""
    server.add(CACHE, shards=0, state="queued")
    teacher = land_shards(server, 0.1, 2)
    with stream_topk(server.url, CACHE.id, batch_size=1, shuffle=False, follow=True, cache_dir=tmp_path) as stream:
        batches = [next(stream) for _ in range(7)]
        with pytest.raises(RequestFailed, match="the engine died"):
            next(stream)
    assert numbers(batches) == list(range(7))
    teacher.join()


def test_follow_stops_at_a_gap(server: FaultyServer, tmp_path: Path) -> None:
    """Shards may land out of order; the order of the stream is that of the data set."""
    gapped = replace(CACHE.manifest, complete=False, shards=CACHE.manifest.shards[::2])
    server.add(CACHE)
    server.views[CACHE.id]["state"] = "running"
    server.manifests[gapped.digest] = gapped.to_bytes()
    server.newest[CACHE.id] = gapped.digest
    timer = threading.Timer(0.4, server.add, [CACHE])
    timer.start()
    with stream_topk(server.url, CACHE.id, batch_size=1, shuffle=False, follow=True, cache_dir=tmp_path) as stream:
        assert numbers(next(stream) for _ in range(3)) == [0, 1, 2]
        assert numbers(stream) == list(range(3, COUNT))
    timer.join()


def test_without_follow_the_end_is_waited_for(server: FaultyServer, tmp_path: Path) -> None:
    server.add(CACHE, shards=0, state="queued")
    teacher = land_shards(server, 0.1, len(CACHE.blobs))
    with stream_topk(server.url, CACHE.id, batch_size=4, cache_dir=tmp_path) as stream:
        assert stream.manifest.complete
        assert sorted(numbers(stream)) == list(range(COUNT))
    teacher.join()


@pytest.mark.parametrize("shards", [0, 2])
def test_failed_request_raises(server: FaultyServer, tmp_path: Path, shards: int) -> None:
    server.add(CACHE, shards=shards)
    server.fail_request(CACHE)
    with pytest.raises(RequestFailed, match="the engine died"):
        stream_topk(server.url, CACHE.id, batch_size=4, cache_dir=tmp_path)


def test_incomplete_manifest_by_digest_is_refused(server: FaultyServer, tmp_path: Path) -> None:
    server.add(CACHE, shards=2)
    settings: dict[str, Any]
    for settings in ({"follow": True, "shuffle": False}, {}):
        with pytest.raises(ConfigError, match="never changes; name its request"):
            stream_topk(server.url, CACHE.partial(2).digest, batch_size=4, cache_dir=tmp_path, **settings)


def test_closing_early_leaves_no_thread(served: FaultyServer) -> None:
    stream = stream_topk(served.url, CACHE.id, batch_size=1)
    next(stream)
    assert len(stream_threads()) == 1
    stream.close()
    stream.close()
    assert stream_threads() == []
    with pytest.raises(ConfigError, match="closed"):
        next(stream)


def test_closing_ends_a_wait_for_the_teacher(server: FaultyServer, tmp_path: Path) -> None:
    server.add(CACHE, shards=1)
    stream = stream_topk(server.url, CACHE.id, batch_size=3, shuffle=False, follow=True, cache_dir=tmp_path)
    next(stream)
    began = time.monotonic()
    stream.close()
    assert time.monotonic() - began < 5.0
    assert stream_threads() == []


def test_closing_ends_retries(served: FaultyServer) -> None:
    served.fail("GET", "/v1/blobs", *[refuse(Code.UNAVAILABLE)] * 1000)
    stream = stream_topk(served.url, CACHE.id, batch_size=3, retry_s=1000.0)
    threading.Timer(0.3, stream.close).start()
    with pytest.raises((ConnectionFailed, ConfigError), match="closed"):
        next(stream)
    for thread in stream_threads():
        thread.join(5.0)
    assert stream_threads() == []


def test_forgotten_stream_ends_its_thread(pulled: Path) -> None:
    stream: TopkStream | None = stream_topk(pulled, batch_size=1)
    assert stream is not None
    next(stream)
    threads = stream_threads()
    assert len(threads) == 1
    stream = None
    gc.collect()
    threads[0].join(5.0)
    assert not threads[0].is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_goes_on_by_itself(served: FaultyServer, tmp_path: Path) -> None:
    """Parent and child both get the rest, with threads and connections of their own."""
    with stream_topk(served.url, CACHE.id, batch_size=2, shuffle=False) as stream:
        head = numbers([next(stream)])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if numbers(stream) == list(range(2, COUNT)) else 2
                stream.close()
            finally:
                os._exit(status)
        assert head + numbers(stream) == list(range(COUNT))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
