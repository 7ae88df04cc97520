"""`teachercache verify`, `export`, `import` and `repack`: tools for shard files and cache folders.

`inspect` is the client's command, for it finds shards in the local cache, too.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .codes import EXIT_INTEGRITY, EXIT_OK
from .output import print_fields, print_json
from .progress import counting
from .request import DEFAULT_SHARD_POSITIONS, PROFILES

if TYPE_CHECKING:
    from .importer import Origin

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SOURCE_HELP = "a shard file, or a folder made by `pull`, `import` or `repack`"


def register(subparsers: Subparsers) -> None:
    """Add the tools to the command line."""
    verify = _verb(subparsers, "verify", _verify, "read everything and say what is damaged (exit code 6)")
    verify.add_argument("path", type=Path, help=SOURCE_HELP)

    export = _verb(subparsers, "export", _export, "write Parquet or Arrow IPC that other tools read")
    export.add_argument("path", type=Path, help=SOURCE_HELP)
    export.add_argument("target", type=Path, help="a file that ends in .parquet, .arrow or .feather")

    _register_import(subparsers)

    repack = _verb(subparsers, "repack", _repack, "write shards anew, with fewer digits or a smaller support")
    repack.add_argument("path", type=Path, help=SOURCE_HELP)
    repack.add_argument("target", type=Path, help="a file for a shard, a new folder for a cache")
    repack.add_argument("--profile", choices=PROFILES, help="grid of the values (default: the stored one)")
    repack.add_argument("--k", type=int, help="entries to keep, only of rows without tail samples (default: all)")


def _register_import(subparsers: Subparsers) -> None:
    parser = _verb(subparsers, "import", _import, "make shards of Parquet: exported, plain or DistillKit's")
    parser.add_argument("source", type=Path, help="a .parquet file, or a folder of them")
    parser.add_argument("target", type=Path, help="a new folder for a cache, or one shard that ends in .tkc")
    parser.add_argument("--teacher", help="name or digest, for rows that do not say who made them")
    parser.add_argument("--tokenizer", help="folder or digest, for the same")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="for the same (DistillKit: what the config says)")
    parser.add_argument("--config", type=Path, help="DistillKit's compression config (default: beside its files)")
    parser.add_argument("--profile", choices=PROFILES, help="grid of the values (default: the exported one, or bf16)")
    parser.add_argument(
        "--shard-positions", type=int, default=DEFAULT_SHARD_POSITIONS, metavar="N", help="tokens a shard (%(default)s)"
    )


def _verb(subparsers: Subparsers, name: str, handler: Any, help: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=help, description=help)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.set_defaults(handler=handler)
    return parser


def _verify(args: argparse.Namespace) -> int:
    from .shard_set import ShardSet
    from .verify import verify

    shards = ShardSet(args.path)
    with counting("verify", "shards") as report:
        damaged = verify(shards, report)
    fields = {"path": str(args.path), "shards": len(shards.members), "damaged": len(damaged)}
    if args.json:
        print_json(fields | {"damaged": [asdict(damage) for damage in damaged]})
    else:
        print_fields(fields, as_json=False)
        for damage in damaged:
            print(f"  {damage.error}")
    return EXIT_INTEGRITY if damaged else EXIT_OK


def _export(args: argparse.Namespace) -> int:
    from .export import export
    from .shard_set import ShardSet

    with counting("export") as report:
        sequences = export(ShardSet(args.path), args.target, report)
    print_fields(_written(args.target) | {"sequences": sequences}, args.json)
    return EXIT_OK


def _import(args: argparse.Namespace) -> int:
    from .importer import import_rows

    with counting("import") as report:
        imported = import_rows(
            args.source,
            args.target,
            origin=_origin(args),
            config=args.config,
            profile=args.profile,
            shard_positions=args.shard_positions,
            report=report,
        )
    fields = _written(args.target) | {"layout": imported.layout, "sequences": imported.sequences}
    if imported.ignored:
        fields["ignored"] = list(imported.ignored) if args.json else ", ".join(imported.ignored)
    print_fields(fields, args.json)
    return EXIT_OK


def _origin(args: argparse.Namespace) -> Origin | None:
    from .errors import SourceError
    from .importer import Origin

    given = (args.teacher, args.tokenizer)
    if given == (None, None) and args.vocab_size is None:
        return None
    if None in given:
        raise SourceError("name both --teacher and --tokenizer, or neither")
    return Origin(args.teacher, args.tokenizer, args.vocab_size)


def _repack(args: argparse.Namespace) -> int:
    from .repack import repack
    from .shard_set import ShardSet

    shards = ShardSet(args.path)
    with counting("repack") as report:
        repack(shards, args.target, profile=args.profile, k=args.k, report=report)
    print_fields(_written(args.target) | {"sequences": shards.num_sequences}, args.json)
    return EXIT_OK


def _written(target: Path) -> dict[str, Any]:
    from .cache_folder import read_manifest
    from .digest import digest_file

    if target.is_dir():
        manifest = read_manifest(target)
        return {"target": str(target), "manifest": manifest.digest, "bytes": manifest.num_bytes}
    return {"target": str(target), "digest": digest_file(target), "bytes": target.stat().st_size}
