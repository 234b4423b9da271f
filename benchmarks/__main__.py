"""Compare the speed of normattn and other libraries: `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import attention, decoding, extending, training
from benchmarks.harness import DTYPES, Options, Result, measure, write_record

BENCHMARKS = {
    "plain": attention.plain,
    "absorbed": attention.absorbed,
    "two-regime": attention.two_regime,
    "bias": attention.bias,
    "decode": decoding.decode,
    "train": training.train,
    "extend": extending.extend,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; `--help` describes each benchmark."""
    about = "\n".join(f"  {name:<12}{function.__doc__}" for name, function in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads (default 1)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="numbers of tokens")
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: a quick test")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for the record"
    )
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}: choose from {', '.join(BENCHMARKS)}")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use")
    if min(args.rounds, args.threads, *args.lengths) < 1:
        parser.error("--rounds, --threads and --lengths must be at least 1")
    return args


def main(arguments: list[str]) -> None:
    """Run the chosen benchmarks, write the record after each case, and print the table."""
    args = parse(arguments)
    options = Options(
        args.device,
        args.rounds,
        args.threads,
        tuple(sorted(args.lengths)),
        tuple(args.dtypes),
        args.quick,
    )
    results: list[Result] = []
    table = ""
    for name in args.names or BENCHMARKS:
        for case in BENCHMARKS[name](options):
            print(case.name, file=sys.stderr, flush=True)
            results.append(measure(case, options))
            table = write_record(results, options, args.out)
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
