"""The client's verbs: submit, wait, status, retry, cancel, ls, pull, inspect. Each returns its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..format_spec import Generation, is_digest, is_request_id
from ..format_spec.codes import EXIT_OK
from ..format_spec.output import print_fields, print_json, size_text
from ..format_spec.request import AUTO, DEFAULT_K, DEFAULT_SHARD_POSITIONS, canonical_min_prob

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..format_spec import Fingerprint
    from ..format_spec.summary import SequenceSummary, Summary
    from .client import Client
    from .views import Estimate, RequestView

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# Someone sits in front of it and may have mistyped the url.
RETRY_S = 20.0
INSPECT_HELP = "say what a shard or a cache holds: identity, sizes, quality, an example row"
WHAT_HELP = (
    "a digest names a shard in the local cache; with --sequence also a manifest on the server, as a request does"
)


def register(subparsers: Subparsers) -> None:
    """Add the client's verbs to the command line."""
    _register_submit(subparsers)

    wait = _verb(subparsers, "wait", _wait, "wait until a request is complete")
    wait.add_argument("request", help="request id")
    wait.add_argument("--timeout", type=float, metavar="SECONDS", help="give up waiting after this time (exit code 7)")

    status = _verb(subparsers, "status", _status, "show one request")
    status.add_argument("request", help="request id")

    retry = _verb(subparsers, "retry", _retry, "queue a failed request again; what it finished stays")
    retry.add_argument("request", help="request id")

    cancel = _verb(subparsers, "cancel", _cancel, "take back a request; the teacher stops when nobody else wants it")
    cancel.add_argument("request", help="request id")

    _verb(subparsers, "ls", _ls, "list the server's requests, the newest first")

    pull = _verb(subparsers, "pull", _pull, "fetch a complete cache into a directory, to be read without a server")
    pull.add_argument("cache", help="request id (waited for when it still runs) or manifest digest")
    pull.add_argument("directory", type=Path)

    inspect = _verb(subparsers, "inspect", _inspect, INSPECT_HELP)
    inspect.add_argument("what", metavar="FILE|FOLDER|DIGEST|REQUEST", help=WHAT_HELP)
    inspect.add_argument(
        "--sequence", type=int, metavar="N", help="one sequence alone, from 0 on; shards stay unfetched"
    )
    inspect.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="show the example row's tokens as text")


def _register_submit(subparsers: Subparsers) -> None:
    submit = _verb(subparsers, "submit", _submit, "upload a data set and have the teacher score it")
    submit.add_argument("file", type=Path, help="JSON Lines or Parquet; each row has input_ids, text or messages")
    submit.add_argument("--teacher", help="name or digest; may be left out when the server has one teacher")
    submit.add_argument("--k", type=int, default=DEFAULT_K, help="entries kept of each distribution (%(default)s)")
    submit.add_argument(
        "--min-prob",
        default="0",
        metavar="P",
        help="of these, keep those at least so probable, like 0.001 (%(default)s)",
    )
    submit.add_argument(
        "--tail-samples",
        type=_count_or_auto,
        default=AUTO,
        metavar="N",
        help="ids drawn from each tail (%(default)s)",
    )
    submit.add_argument("--seed", type=int, default=0, help="of the tail samples and completions (%(default)s)")
    submit.add_argument(
        "--generate",
        type=int,
        metavar="TOKENS",
        help="rows are prompts: the teacher continues each by at most so many tokens, then scores the whole",
    )
    submit.add_argument("--temperature", default="1", metavar="T", help="of completions, 0 for greedy (%(default)s)")
    submit.add_argument("--top-p", default="1", metavar="P", help="of completions (%(default)s)")
    submit.add_argument(
        "--shard-positions", type=int, default=DEFAULT_SHARD_POSITIONS, metavar="N", help="tokens a shard (%(default)s)"
    )
    submit.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, default=True, help="wait until it is complete (default)"
    )
    submit.add_argument("--dry-run", action="store_true", help="upload, then print what it would cost")


def _verb(subparsers: Subparsers, name: str, handler: Any, help: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=help, description=help)
    parser.add_argument("--url", help="the server (default: TEACHERCACHE_URL)")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.set_defaults(handler=handler)
    return parser


def _count_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else int(text)


def _client(args: argparse.Namespace) -> Client:
    from .client import Client

    return Client(args.url, retry_s=RETRY_S)


def _submit(args: argparse.Namespace) -> int:
    with _client(args) as client:
        settings = {
            "teacher": args.teacher or _only_teacher(client),
            "k": args.k,
            "min_prob": canonical_min_prob(args.min_prob),
            "tail_samples": args.tail_samples,
            "seed": args.seed,
            "shard_positions": args.shard_positions,
        }
        if args.generate is not None:
            settings["generate"] = Generation(args.generate, args.temperature, args.top_p)
        settings["data"] = client.upload(args.file)
        if args.dry_run:
            _print_estimate(client.estimate(**settings), args.json)
            return EXIT_OK
        view = client.submit(**settings)
        if not args.json:
            print(f"request   {view.id}{'' if view.created else ' (exists)'}", flush=True)
        if args.wait:
            view = _wait_with_bar(client, view.id)
    if args.json:
        print_json(view.to_json())
    elif args.wait:
        print(f"manifest  {view.manifest}")
    return EXIT_OK


def _wait(args: argparse.Namespace) -> int:
    with _client(args) as client:
        view = _wait_with_bar(client, args.request, args.timeout)
    _print_view(view, args.json)
    return EXIT_OK


def _status(args: argparse.Namespace) -> int:
    with _client(args) as client:
        _print_view(client.status(args.request), args.json)
    return EXIT_OK


def _retry(args: argparse.Namespace) -> int:
    with _client(args) as client:
        _print_view(client.retry(args.request), args.json)
    return EXIT_OK


def _cancel(args: argparse.Namespace) -> int:
    with _client(args) as client:
        _print_view(client.cancel(args.request), args.json)
    return EXIT_OK


def _ls(args: argparse.Namespace) -> int:
    with _client(args) as client:
        if args.json:
            print_json([view.to_json() for view in client.ls()])
            return EXIT_OK
        for view in client.ls():
            print(f"{view.id}  {view.state:10}  {_share(view):>4}  {view.created_at}  {view.teacher_name}")
    return EXIT_OK


def _pull(args: argparse.Namespace) -> int:
    from ..format_spec.progress import progress

    with _client(args) as client:
        if is_request_id(args.cache):
            _wait_with_bar(client, args.cache)
        with progress("pull") as report:

            def show(done: int, total: int) -> None:
                report(done, total, f"fetched {size_text(done)}")

            manifest = client.pull(args.cache, args.directory, show)
    summary = {"directory": str(args.directory), "manifest": manifest.digest, "shards": len(manifest.shards)}
    summary |= {"bytes": manifest.num_bytes, "sequences": manifest.sequences, "positions": manifest.num_positions}
    print_fields(summary, args.json)
    return EXIT_OK


def _inspect(args: argparse.Namespace) -> int:
    summary, text = _summary(args) if args.sequence is None else _sequence_summary(args)
    if args.json:
        print_json(summary.to_json())
    else:
        print("\n".join(summary.lines(text)))
    return EXIT_OK


def _summary(args: argparse.Namespace) -> tuple[Summary, Callable[[int], str]]:
    """Return what a shard or a cache holds, and what shows a token."""
    from ..format_spec.progress import counting
    from ..format_spec.shard_set import ShardSet
    from ..format_spec.summary import summarise

    shards = ShardSet(_local_path(args.what))
    text = _token_text(args.tokenizer, shards.metadata.fingerprint)
    with counting("inspect") as report:
        return summarise(shards, report), text


def _sequence_summary(args: argparse.Namespace) -> tuple[SequenceSummary, Callable[[int], str]]:
    """Return what one sequence holds, and what shows a token."""
    from ..format_spec.shard_set import ShardSet
    from ..format_spec.summary import SequenceSummary

    path = _local_path(args.what)
    if not path.exists() and (is_digest(args.what) or is_request_id(args.what)):
        with _client(args) as client, client.sequences(args.what) as sequences:
            text = _token_text(args.tokenizer, sequences.manifest.fingerprint)
            sequence = sequences.read(args.sequence)
    else:
        shards = ShardSet(path)
        text = _token_text(args.tokenizer, shards.metadata.fingerprint)
        sequence = shards.sequence(args.sequence)
    return SequenceSummary.of(args.what, args.sequence, sequence), text


def _token_text(tokenizer: Path | None, maker: Fingerprint) -> Callable[[int], str]:
    from ..format_spec.pieces import Pieces

    return str if tokenizer is None else Pieces(tokenizer, maker.tokenizer).text


def _local_path(what: str) -> Path:
    from .blobs import BlobCache

    return BlobCache().path(what) if is_digest(what) else Path(what)


def _only_teacher(client: Client) -> str:
    from .errors import ConfigError

    names = [teacher.name for teacher in client.teachers()]
    if len(names) != 1:
        raise ConfigError(f"name the teacher with --teacher; the server has {names}")
    return names[0]


def _wait_with_bar(client: Client, request_id: str, timeout_s: float | None = None) -> RequestView:
    from ..format_spec.progress import progress

    try:
        with progress("teacher") as report:

            def show(view: RequestView) -> None:
                speed = f" {view.tokens_per_s:.0f} tokens/s" if view.tokens_per_s else ""
                report(view.positions_done, view.positions_total, view.activity or view.state + speed)

            return client.wait(request_id, timeout_s, show)
    except KeyboardInterrupt:
        print(f"the server goes on; come back with: teachercache wait {request_id}", file=sys.stderr)
        raise


def _print_estimate(estimate: Estimate, as_json: bool) -> None:
    if as_json:
        print_json(estimate.to_json())
        return
    print(f"request    {estimate.id}{' (exists: costs nothing)' if estimate.exists else ''}")
    print(f"sequences  {estimate.sequences}")
    print(f"tokens     {estimate.positions}")
    print(f"bytes      {estimate.estimated_bytes} ({size_text(estimate.estimated_bytes)})")
    seconds = estimate.estimated_seconds
    print(f"time       {'not known yet' if seconds is None else f'{seconds:.0f} s'}")


def _print_view(view: RequestView, as_json: bool) -> None:
    if as_json:
        print_json(view.to_json())
        return
    done = f"{view.positions_done} of {'?' if view.positions_total is None else view.positions_total}"
    fields = {"request": view.id, "state": view.state, "teacher": view.teacher_name, "tokens": done}
    fields |= {"shards": f"{view.shards_done} of {'?' if view.shards_total is None else view.shards_total}"}
    if view.activity:
        fields["activity"] = view.activity
    if view.error:
        fields["error"] = f"{view.error.get('detail')} [{view.error.get('code')}]"
    if view.manifest:
        fields["manifest"] = view.manifest
    print_fields(fields, as_json=False)


def _share(view: RequestView) -> str:
    return f"{100 * view.positions_done // view.positions_total}%" if view.positions_total else ""
