"""``python -m bench NAME [options]``; the last line of the output is one JSON object."""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.record import provenance, save

#: Name to module; a module has ``configure(parser)`` and ``run(options) -> Outcome``.
BENCHMARKS = {
    "attention": "bench.attention",
    "decode_hf": "bench.decode_hf",
    "kv_exposed": "bench.kv_exposed",
    "encode_overlap": "bench.encode_overlap",
    "encoder_cache": "bench.encoder_cache",
    "encoder_parallel": "bench.encoder_parallel",
    "kv_transfer": "bench.kv_transfer",
    "pipelined_start": "bench.pipelined_start",
    "router": "bench.router",
    "router_cache_aware": "bench.router_cache_aware",
}


def main(argv: list[str]) -> int:
    """Runs one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    names = parser.add_subparsers(dest="name", required=True)
    name = next((part for part in argv if part in BENCHMARKS), None)
    for known, module_name in BENCHMARKS.items():
        command = names.add_parser(known)
        command.add_argument("--out", type=Path, help="folder for raw samples and versions")
        if known == name:  # only the one in use is imported: most need torch
            importlib.import_module(module_name).configure(command)
    options = parser.parse_args(argv)
    origin = provenance(argv)
    outcome = importlib.import_module(BENCHMARKS[options.name]).run(options)
    if options.out is not None:
        save(options.out, options.name, origin, outcome.result, [asdict(s) for s in outcome.raw])
    print(json.dumps({"benchmark": options.name, **outcome.result}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
