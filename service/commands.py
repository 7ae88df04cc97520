"""`teachercache serve` and `teachercache worker`."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from threading import Event, Thread
from typing import Any


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` and `worker`; what is not given comes from TEACHERCACHE_... variables, else a default."""
    parser = subparsers.add_parser("serve", help="serve teachers over HTTP, with a worker process that scores")
    _add_shared(parser)
    parser.add_argument("--host", help="address to listen on; off loopback only with tokens (127.0.0.1)")
    parser.add_argument(
        "--anonymous-read", action=argparse.BooleanOptionalAction, help="let those without a token read (no)"
    )
    parser.add_argument(
        "--first-token-file", metavar="FILE", help="a secret of 32 characters or more that opens everything, as a file"
    )
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (8765)")
    parser.add_argument(
        "--replicas", type=int, help="worker processes, each with the teacher on its own GPUs or share of the cores (1)"
    )
    parser.add_argument("--upload-limit", type=int, metavar="BYTES", help="largest data set to take (16 GiB)")
    parser.add_argument("--drain-seconds", type=float, help="time to end in after SIGTERM (10)")
    parser.set_defaults(handler=run_serve)
    parser = subparsers.add_parser("worker", help="run the teacher for a data directory; serve starts one by itself")
    _add_shared(parser)
    parser.add_argument("--supervised", action="store_true", help="end when standard input does")
    parser.set_defaults(handler=run_worker)
    _register_token(subparsers)
    parser = subparsers.add_parser("fsck", help="read everything that a stopped server has stored, and compare")
    parser.add_argument("--data-dir", help="the server's ($XDG_DATA_HOME/teachercache)")
    parser.add_argument(
        "--repair", action="store_true", help="have what is lost or damaged made again, and remove what nothing names"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.set_defaults(handler=run_fsck)
    parser = subparsers.add_parser("audit", help="score a part of a pulled cache again, and compare")
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder that pull made, or a shard")
    parser.add_argument("--teacher", required=True, metavar="PATH", help="the teacher's folder or hub id")
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.set_defaults(handler=run_audit)


def _register_token(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("token", help="make, list and revoke the tokens that a server asks for")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a token and print it, once")
    create.add_argument("--owner", required=True, help="whose it is")
    create.add_argument(
        "--scope", action="append", metavar="SCOPE", help="read, submit or admin; may be repeated (read, submit)"
    )
    create.add_argument("--days", type=float, help="days that it lives (for ever)")
    create.set_defaults(handler=run_token_create)
    show = actions.add_parser("list", help="list tokens, without what opens anything")
    show.set_defaults(handler=run_token_list)
    revoke = actions.add_parser("revoke", help="make a token open nothing any more, at once")
    revoke.add_argument("id", help="as list shows it")
    revoke.set_defaults(handler=run_token_revoke)
    for each in (create, show, revoke):
        each.add_argument("--data-dir", help="the server's ($XDG_DATA_HOME/teachercache)")


def _records(args: argparse.Namespace) -> Any:
    from .data_dir import DataDir
    from .settings import load_settings
    from .sqlite_meta import SqliteMeta

    return SqliteMeta(DataDir(load_settings(data_dir=args.data_dir).data_dir).database)


def run_token_create(args: argparse.Namespace) -> int:
    """Make a token and print it."""
    from .tokens import hash_of, make_token

    token, text = make_token(args.owner, args.scope or ["read", "submit"], args.days)
    _records(args).add_token(token, hash_of(text))
    print(text)
    return 0


def run_token_list(args: argparse.Namespace) -> int:
    """Print a line for each token."""
    from datetime import UTC, datetime

    for token in _records(args).tokens():
        state = "revoked" if token.revoked else "valid" if token.is_valid(datetime.now(UTC)) else "expired"
        print(f"{token.id}  {state:8} {token.owner}  {','.join(token.scopes)}  until {token.expires_at or 'revoked'}")
    return 0


def run_token_revoke(args: argparse.Namespace) -> int:
    """Revoke a token."""
    token = _records(args).revoke_token(args.id)
    print(f"the token {token.id} of {token.owner} opens nothing any more")
    return 0


def run_fsck(args: argparse.Namespace) -> int:
    """Say what was found; exit code 6 where something is wrong that was not repaired."""
    from ..format_spec.codes import EXIT_INTEGRITY
    from ..format_spec.output import print_fields, print_json
    from ..format_spec.progress import counting
    from .data_dir import DataDir, ServerLock
    from .fsck import fsck
    from .settings import load_settings
    from .sqlite_meta import SqliteMeta
    from .store import LocalStore

    data_dir = DataDir(load_settings(data_dir=args.data_dir).data_dir)
    with ServerLock(data_dir.root), counting("reading", "blobs") as report:
        meta = SqliteMeta(data_dir.database)
        found = fsck(LocalStore(data_dir.root), meta, repair=args.repair, report=report)
    if args.json:
        print_json(found.to_json())
    else:
        counts = {name: len(value) if isinstance(value, list) else value for name, value in found.to_json().items()}
        print_fields(counts, as_json=False)
        for name in ("lost", "damaged"):
            for digest in getattr(found, name):
                print(f"{name}: {digest}")
    return 0 if found.is_sound else EXIT_INTEGRITY


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    from .server import serve

    serve(_settings(args))
    return 0


def run_worker(args: argparse.Namespace) -> int:
    """Work until a signal, or until nothing was to be done for a while."""
    import logging

    from .data_dir import DataDir
    from .sqlite_meta import SqliteMeta
    from .store import LocalStore
    from .worker import Worker

    settings = _settings(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    data_dir = DataDir(settings.data_dir)
    stop = Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda number, frame: stop.set())
    if args.supervised:
        Thread(target=_await_end_of_input, args=(stop,), daemon=True).start()
    store = LocalStore(data_dir.root, settings.free_space_reserve)
    Worker(settings, store, SqliteMeta(data_dir.database), stop).run()
    return 0


def run_audit(args: argparse.Namespace) -> int:
    """Print what an audit finds; more than rounding is an error."""
    from contextlib import closing

    from ..format_spec import digest_file
    from ..format_spec.output import print_fields
    from ..format_spec.progress import counting
    from ..format_spec.shard_set import ShardSet
    from .audit import audit_cache, check, to_json
    from .engines import load_engine
    from .teachers import read_teacher, resolve_path

    shards, choice = ShardSet(args.path), _settings(args).choice
    teacher = read_teacher("audit", resolve_path(args.teacher), choice, digest_file)
    dtypes = {"dtype": teacher.dtype, "head_dtype": teacher.head_dtype}
    engine = load_engine(teacher.engine, teacher.path, **dtypes, **choice.options())
    with closing(engine), counting("auditing", "shards") as report:
        tally = audit_cache(shards, engine, report)
    same = shards.metadata.fingerprint.teacher == teacher.digest
    print_fields({"path": str(args.path), "same_teacher": same, **to_json(tally)}, args.json)
    check(tally)
    return 0


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--teacher",
        action="append",
        metavar="NAME=PATH",
        help="a teacher to serve, a folder or hub id; may be repeated",
    )
    parser.add_argument("--data-dir", help="where everything is kept ($XDG_DATA_HOME/teachercache)")
    _add_engine(parser)
    parser.add_argument("--free-space-reserve", type=int, metavar="BYTES", help="disk space never used (1 GiB)")
    parser.add_argument("--idle-seconds", type=float, help="idle time after which the worker frees memory (300)")
    parser.add_argument("--lease-seconds", type=float, help="time without progress after which a worker is lost (300)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        help="what runs the teachers: transformers, vllm or openai, a vLLM server that runs already (transformers)",
    )
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or auto, what the teacher's config says (auto)")
    parser.add_argument(
        "--head-dtype", help="vllm: dtype of the logits, float32 or auto, the same as --dtype (float32)"
    )
    parser.add_argument(
        "--capture-path",
        help="vllm: hook, flat (plain top-k by its public API) or auto, hook where it gives what flat gives (auto)",
    )
    parser.add_argument(
        "--engine-arg", action="append", metavar="NAME=VALUE", help="a setting of the engine's own; may be repeated"
    )


def _settings(args: argparse.Namespace) -> Any:
    from .engine_choice import parse_engine_args
    from .errors import InvalidSettings
    from .settings import Settings, load_settings, parse_teachers

    given = {name: getattr(args, name, None) for name in Settings.model_fields}
    try:
        given["teachers"] = parse_teachers(args.teacher) if isinstance(args.teacher, list) else None
        given["engine_args"] = None if args.engine_arg is None else parse_engine_args(args.engine_arg)
    except ValueError as error:
        raise InvalidSettings(str(error)) from error
    return load_settings(**given)


def _await_end_of_input(stop: Event) -> None:
    # the pipe of the server that started us ends when it does, however that comes; sys.stdin would hold a lock
    # that the interpreter wants when it ends before the pipe
    while os.read(0, 1):
        pass
    stop.set()
